"""What aliases a tenant sees, on a real Redis, and how often Redis is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import structlog.testing

from services.gateway.tenancy.api_keys import REFRESH_S
from services.gateway.tenancy.model_aliases import LOOK_UP_ALIASES, ModelAliases
from shared.clock import MonotonicClock
from shared.errors import DependencyUnavailable
from shared.store import RedisStore, StoreRejected, StoreUnavailable
from shared.tenancy.model_alias import ALIASES, MAX_ALIASES, aliases_of
from shared.tenancy.model_alias_admin import ModelAliasAdmin
from shared.tenancy.tenant import GENERATION, TENANTS
from shared.tenancy.tenant_admin import store_api_key
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S
from tests.support.world.store import MemoryStore

SCOUT = "@cf/meta/llama-4-scout-17b-16e-instruct"


class ManualClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    async def sleep(self, delay_s: float) -> None:
        self.time += delay_s
        await asyncio.sleep(0)


class CountingStore(RedisStore):
    """Counts look-ups; each one waits for `answers`."""

    def __init__(self, url: str, clock: Any) -> None:
        super().__init__(url, clock, timeout_s=LIMIT_S)
        self.num_lookups = 0
        self.answers = asyncio.Event()
        self.answers.set()

    async def evaluate(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        self.num_lookups += 1
        await self.answers.wait()
        return await super().evaluate(script, keys, arguments)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def admin(redis_server: RedisServer) -> AsyncIterator[ModelAliasAdmin]:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=LIMIT_S)
    await store.write([("FLUSHALL",)])
    for tenant_id in ("acme", "other"):
        await store_api_key(store, f"key-{tenant_id}", tenant_id)
    yield ModelAliasAdmin(store, lambda: 1.0)
    await store.close()


@pytest.fixture
async def store(redis_server: RedisServer, clock: ManualClock) -> AsyncIterator[CountingStore]:
    store = CountingStore(redis_server.url, clock)
    yield store
    await store.close()


@pytest.fixture
def aliases(store: CountingStore, clock: ManualClock) -> ModelAliases:
    return ModelAliases(store, clock, is_native=lambda _, name: name == "native")


async def test_own_alias_takes_precedence_and_others_are_invisible(
    admin: ModelAliasAdmin, aliases: ModelAliases
) -> None:
    await admin.put(SCOUT, "native")
    await admin.put("fast", "native")
    await admin.put("fast", "big", "acme")
    await admin.put("secret", "native", "acme")
    assert await aliases.resolve("acme", SCOUT) == "native"
    assert await aliases.resolve("acme", "fast") == "big"
    assert await aliases.resolve("other", "fast") == "native"
    assert await aliases.resolve("other", "secret") is None
    assert await aliases.of_tenant("acme") == {SCOUT: "native", "fast": "big", "secret": "native"}
    assert await aliases.of_tenant("other") == {SCOUT: "native", "fast": "native"}


async def test_native_name_is_never_looked_up_nor_shadowed(
    admin: ModelAliasAdmin, aliases: ModelAliases, store: CountingStore
) -> None:
    await admin.put("native", "big", "acme")
    assert await aliases.resolve("acme", "native") == "native"
    for invalid in ("", "a b", "x" * 257, "a//b", "\ud800"):
        assert await aliases.resolve("acme", invalid) is None
    assert store.num_lookups == 0
    assert await aliases.of_tenant("acme") == {}


async def test_alias_of_an_alias_is_not_followed(
    admin: ModelAliasAdmin, aliases: ModelAliases
) -> None:
    await admin.put("a", "b")
    await admin.put("b", "native")
    assert await aliases.resolve("acme", "a") == "b"


async def test_changes_apply_within_a_second(
    admin: ModelAliasAdmin, aliases: ModelAliases, clock: ManualClock
) -> None:
    assert await aliases.resolve("acme", "a") is None
    await admin.put("a", "native")
    assert REFRESH_S < 1
    clock.time += REFRESH_S
    assert await aliases.resolve("acme", "a") == "native"
    await admin.put("a", "big", "acme")
    clock.time += REFRESH_S
    assert await aliases.resolve("acme", "a") == "big"
    await admin.remove("a", "acme")
    await admin.remove("a")
    clock.time += REFRESH_S
    assert await aliases.resolve("acme", "a") is None


async def test_unknown_names_cost_one_lookup_and_no_memory(
    admin: ModelAliasAdmin, aliases: ModelAliases, store: CountingStore, clock: ManualClock
) -> None:
    await admin.put("a", "native")
    for index in range(100):
        assert await aliases.resolve("acme", f"no-{index}") is None
    assert await aliases.resolve("acme", "a") == "native"
    assert store.num_lookups == 1
    clock.time += REFRESH_S
    await asyncio.gather(*(aliases.resolve("acme", f"no-{index}") for index in range(100)))
    assert store.num_lookups == 2
    assert list(aliases._known) == ["acme"]
    assert list(aliases._known["acme"].shared.models) == ["a"]


async def test_number_of_cached_tenants_is_limited(
    admin: ModelAliasAdmin, store: CountingStore, clock: ManualClock
) -> None:
    aliases = ModelAliases(store, clock, is_native=lambda _, name: name == "native", max_tenants=2)
    await admin.put("a", "native")
    for tenant_id in ("t1", "t2", "t1", "t3", "t1"):
        assert await aliases.resolve(tenant_id, "a") == "native"
    assert list(aliases._known) == ["t3", "t1"] and store.num_lookups == 3
    shared = [known.shared for known in aliases._known.values()]
    assert shared[0] is shared[1]  # decoded once


async def test_concurrent_requests_share_one_lookup(
    admin: ModelAliasAdmin, aliases: ModelAliases, store: CountingStore
) -> None:
    await admin.put("a", "native")
    store.answers.clear()
    waiting = [asyncio.create_task(aliases.resolve("acme", "a")) for _ in range(20)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # a client may disconnect
    await asyncio.sleep(0)
    store.answers.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert set(found[1:]) == {"native"} and store.num_lookups == 1


async def test_known_alias_does_not_wait_for_a_slow_lookup(
    admin: ModelAliasAdmin,
    aliases: ModelAliases,
    store: CountingStore,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await admin.put("a", "native")
    assert await aliases.resolve("acme", "a") == "native"
    await admin.put("a", "big")
    await admin.put("b", "big")
    clock.time += REFRESH_S
    store.answers.clear()
    monkeypatch.setattr("services.gateway.tenancy.model_aliases.KNOWN_KEY_WAIT_S", 0.0)
    async with asyncio.timeout(LIMIT_S):
        assert await aliases.resolve("acme", "a") == "native"
        assert await aliases.of_tenant("acme") == {"a": "native"}
    unknown = asyncio.create_task(aliases.resolve("acme", "b"))
    await asyncio.sleep(0)
    assert not unknown.done()
    store.answers.set()
    assert await unknown == "big"
    assert await aliases.resolve("acme", "a") == "big"


async def test_known_aliases_work_without_redis(clock: ManualClock) -> None:
    server = RedisServer()
    admin_store = RedisStore(server.url, clock, timeout_s=LIMIT_S)
    await store_api_key(admin_store, "k", "acme")
    await ModelAliasAdmin(admin_store, lambda: 1.0).put("a", "native")
    store = RedisStore(server.url, clock)
    aliases = ModelAliases(store, clock, is_native=lambda _, name: name == "native")
    assert await aliases.resolve("acme", "a") == "native"
    server.stop()
    clock.time += 60
    assert await aliases.resolve("acme", "a") == "native"
    assert await aliases.of_tenant("acme") == {"a": "native"}
    for tenant_id, name in (("acme", "b"), ("other", "a")):
        with pytest.raises(DependencyUnavailable, match="cannot be checked") as caught:
            await aliases.resolve(tenant_id, name)
        assert caught.value.retry_after_s == 1.0
    with pytest.raises(DependencyUnavailable, match="cannot be checked"):
        await aliases.of_tenant("other")
    await asyncio.gather(admin_store.close(), store.close())


async def test_one_failed_lookup_rejects_no_new_tenant(
    admin: ModelAliasAdmin,
    aliases: ModelAliases,
    store: CountingStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await admin.put("a", "native")
    evaluate, replies = store.evaluate, iter([False])

    async def first_fails(*arguments: Any) -> Any:
        if not next(replies, True):
            raise StoreUnavailable("no reply within 0.05 s")
        return await evaluate(*arguments)

    monkeypatch.setattr(store, "evaluate", first_fails)
    assert await aliases.resolve("acme", "a") == "native"


async def test_emptied_redis_counts_as_unavailable(
    admin: ModelAliasAdmin, aliases: ModelAliases, store: CountingStore, clock: ManualClock
) -> None:
    await admin.put("a", "native")
    assert await aliases.resolve("acme", "a") == "native"
    await store.write([("FLUSHALL",)])
    clock.time += 60
    assert await aliases.resolve("acme", "a") == "native"
    with pytest.raises(DependencyUnavailable, match="cannot be checked"):
        await aliases.resolve("acme", "b")


@pytest.mark.parametrize(
    ("name", "record"),
    [("broken", "{"), ("broken", '{"model":""}'), ("broken", b"\xff"), (b"\xff", "{}")],
)
async def test_unreadable_record_affects_its_own_alias_only(
    admin: ModelAliasAdmin, aliases: ModelAliases, store: CountingStore, name: str, record: str
) -> None:
    await admin.put("broken", "native")
    await admin.put("a", "native")
    await store.write([("HSET", aliases_of("acme"), name, record)])
    with structlog.testing.capture_logs():
        assert await aliases.resolve("acme", "a") == "native"
        if name == "broken":  # not the alias for all tenants: it is another model
            with pytest.raises(DependencyUnavailable, match="'broken' is unreadable"):
                await aliases.resolve("acme", "broken")
            assert await aliases.of_tenant("acme") == {"a": "native"}
        assert await aliases.resolve("other", "broken") == "native"


@pytest.mark.parametrize(
    "command",
    [
        ("SET", aliases_of("acme"), "text"),
        ("HSET", aliases_of("acme"), *(f"x{i}" for i in range(2 * MAX_ALIASES + 2))),
    ],
    ids=["wrong type", "too many"],
)
async def test_unreadable_hash_affects_its_own_tenant_only(
    admin: ModelAliasAdmin,
    aliases: ModelAliases,
    store: CountingStore,
    clock: ManualClock,
    command: Sequence[str],
) -> None:
    await admin.put("a", "native")
    await store.write([command])
    num_before = store.num_lookups
    with structlog.testing.capture_logs() as logs:
        for _ in range(20):
            with pytest.raises(DependencyUnavailable, match="unreadable"):
                await aliases.resolve("acme", "a")
    assert [each["event"] for each in logs] == ["model_aliases_unreadable"]
    assert store.num_lookups == num_before + 1
    assert await aliases.resolve("other", "a") == "native"
    await store.write([("DEL", aliases_of("acme"))])
    clock.time += REFRESH_S
    assert await aliases.resolve("acme", "a") == "native"


async def test_record_with_later_fields_is_readable(
    admin: ModelAliasAdmin, aliases: ModelAliases, store: CountingStore
) -> None:
    await store.write([("HSET", ALIASES, "a", '{"model":"native","task":"text-generation"}')])
    assert await aliases.resolve("acme", "a") == "native"


@pytest.mark.parametrize("max_aliases", [2, 1])
async def test_simulated_look_up_equals_redis(store: CountingStore, max_aliases: int) -> None:
    keys = [aliases_of("acme"), aliases_of(None), GENERATION, TENANTS]
    found: list[Any] = []
    for each in (store, MemoryStore()):
        await store_api_key(each, "k1", "acme")
        await each.write([("HSET", aliases_of("acme"), "@cf/own", '{"model":"m"}')])
        await each.write(
            [("HSET", aliases_of(None), "a", "1"), ("HSET", aliases_of(None), "b", "2")]
        )
        try:
            found.append(await each.evaluate(LOOK_UP_ALIASES, keys, [max_aliases]))
        except StoreRejected as error:
            found.append(type(error))
    assert found[0] == found[1]
