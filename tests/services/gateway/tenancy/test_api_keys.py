from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import structlog.testing

from services.gateway.tenancy.api_keys import LOOK_UP, REFRESH_S, ApiKeys
from services.gateway.tenancy.errors import UnknownTenant
from shared.clock import MonotonicClock
from shared.errors import AuthenticationFailed, ConfigError, DependencyUnavailable
from shared.store import RedisStore, Store
from shared.tenancy.tenant import (
    GENERATION,
    TENANTS,
    TenantRecord,
    api_key_record,
    digest_of,
    keys_of,
)
from shared.tenancy.tenant_admin import TenantAdmin, key_id_of, store_api_key
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S
from tests.support.world.store import MemoryStore

NOW = 1_700_000_000.0


class ManualClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    async def sleep(self, delay_s: float) -> None:
        self.time += delay_s
        await asyncio.sleep(0)


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=LIMIT_S)
    await store.write([("FLUSHALL",)])
    yield store
    await store.close()


@pytest.fixture
def admin(store: RedisStore) -> TenantAdmin:
    return TenantAdmin(store, lambda: NOW)


async def look_up(keys: ApiKeys, api_key: str) -> TenantRecord:
    return await keys.tenant_of(f"Bearer {api_key}")


async def redis_contents(store: RedisStore) -> bytes:
    """Returns the names and fields of all hashes in Redis."""
    script = """
    local all = {}
    for _, key in ipairs(redis.call('KEYS', '*')) do
      if redis.call('TYPE', key).ok == 'hash' then
        all[#all + 1] = key .. ' ' .. table.concat(redis.call('HGETALL', key), ' ')
      end
    end
    return table.concat(all, '\\n')
    """
    text: bytes = await store.evaluate(script, [], [])
    return text


async def test_key_maps_to_tenant_and_is_not_stored(store: RedisStore, admin: TenantAdmin) -> None:
    await admin.add("acme", {"concurrency": 0, "allowed_models": ("m",)}, "secret-key")
    record = await look_up(ApiKeys(store, ManualClock()), "secret-key")
    assert record == TenantRecord(
        tenant_id="acme", concurrency=0, allowed_models=("m",), created_at=NOW
    )
    assert b"acme" in await redis_contents(store)
    assert b"secret-key" not in await redis_contents(store)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic k1", "k1", "Bearer no"])
async def test_invalid_authorization_is_rejected(store: RedisStore, header: str | None) -> None:
    await store_api_key(store, "k1", "acme")
    with pytest.raises(AuthenticationFailed):
        await ApiKeys(store, ManualClock()).tenant_of(header)


async def test_only_revoked_key_is_rejected_within_a_second(
    store: RedisStore, admin: TenantAdmin
) -> None:
    clock = ManualClock()
    keys = ApiKeys(store, clock)
    await admin.add("acme", {}, "k1")
    await admin.add_key("acme", "k2")
    for key in ("k1", "k2"):
        await look_up(keys, key)
    assert await admin.revoke("acme", key_id_of("k1")) == [key_id_of("k1")]
    assert REFRESH_S <= 0.9
    clock.time += REFRESH_S
    with pytest.raises(AuthenticationFailed, match="revoked"):
        await look_up(keys, "k1")
    assert (await look_up(keys, "k2")).tenant_id == "acme"
    assert await admin.revoke("acme", None) == [key_id_of("k2")]
    assert await admin.revoke("acme", None) == []
    clock.time += REFRESH_S
    with pytest.raises(AuthenticationFailed, match="revoked"):
        await look_up(keys, "k2")


async def test_changed_limit_applies_within_a_second(store: RedisStore, admin: TenantAdmin) -> None:
    clock = ManualClock()
    keys = ApiKeys(store, clock)
    await admin.add("acme", {"requests_per_min": 5}, "k1")
    assert (await look_up(keys, "k1")).requests_per_min == 5
    await admin.change("acme", {"requests_per_min": None, "is_zero_retention": True})
    clock.time += REFRESH_S
    record = await look_up(keys, "k1")
    assert record.requests_per_min is None and record.is_zero_retention


async def test_rotated_key_expires_after_grace_period(
    store: RedisStore, redis_server: RedisServer
) -> None:
    redis_time = float(await store.evaluate("return redis.call('TIME')[1]", [], []))
    admin, clock = TenantAdmin(store, lambda: redis_time), ManualClock()
    keys = ApiKeys(store, clock)
    await admin.add("acme", {}, "old")
    replaced = await admin.rotate("acme", "new", keep_s=60, key_id=None)
    assert replaced == [key_id_of("old")]
    for key in ("old", "new"):
        assert (await look_up(keys, key)).tenant_id == "acme"
    clock.time += 58
    assert (await look_up(keys, "new")).tenant_id == "acme"
    # the expiry is cached: a key expires without a lookup, so also while Redis is down
    old = keys._known[digest_of("old")]
    keys._known[digest_of("old")] = dataclasses.replace(old, checked_at=clock.time + 4)
    clock.time += 3
    with pytest.raises(AuthenticationFailed, match="expired"):
        await look_up(keys, "old")
    assert (await look_up(keys, "new")).tenant_id == "acme"


async def test_second_rotation_does_not_extend_expiry(
    store: RedisStore, admin: TenantAdmin
) -> None:
    await admin.add("acme", {}, "k1")
    await admin.rotate("acme", "k2", keep_s=10, key_id=None)
    await admin.rotate("acme", "k3", keep_s=1000, key_id=key_id_of("k1"))
    ends = {key.key_id: key.expires_at for key in await admin.keys("acme")}
    assert ends == {key_id_of("k1"): NOW + 10, key_id_of("k2"): None, key_id_of("k3"): None}


async def test_expired_key_is_rejected_and_not_rotated(
    store: RedisStore, admin: TenantAdmin
) -> None:
    await admin.add("acme", {}, "k1")
    await admin.rotate("acme", "k2", keep_s=0, key_id=None)  # NOW is years before Redis' clock
    with pytest.raises(AuthenticationFailed, match="expired"):
        await look_up(ApiKeys(store, ManualClock()), "k1")
    assert await admin.rotate("acme", "k3", keep_s=0, key_id=None) == [key_id_of("k2")]


async def test_cached_keys_are_valid_without_redis() -> None:
    server = RedisServer()
    clock = ManualClock()
    store = RedisStore(server.url, clock)
    admin_store = RedisStore(server.url, clock, timeout_s=LIMIT_S)
    await TenantAdmin(admin_store, lambda: NOW).add("acme", {"requests_per_min": 7}, "k3")
    keys = ApiKeys(store, clock)
    await look_up(keys, "k3")
    server.stop()
    clock.time += 60
    record = await look_up(keys, "k3")
    assert (record.tenant_id, record.requests_per_min) == ("acme", 7)
    keys.forget("acme", record)  # its regions, read late, are those that are cached
    assert (await look_up(keys, "k3")).tenant_id == "acme"
    with pytest.raises(DependencyUnavailable) as caught:
        await look_up(keys, "k4")
    assert caught.value.retry_after_s == 1.0
    server.start()
    await store_api_key(RedisStore(server.url, clock, timeout_s=LIMIT_S), "k4", "other")
    assert (await look_up(keys, "k4")).tenant_id == "other"
    server.stop()


async def test_emptied_redis_counts_as_unavailable(store: RedisStore, admin: TenantAdmin) -> None:
    """Not as a Redis in which no key is valid."""
    clock = ManualClock()
    keys = ApiKeys(store, clock)
    await admin.add("acme", {"requests_per_min": 7}, "k1")
    await look_up(keys, "k1")
    assert keys.redis_state == "ok"
    await store.write([("FLUSHALL",)])
    clock.time += 60
    with structlog.testing.capture_logs() as logs:
        assert (await look_up(keys, "k1")).requests_per_min == 7
        with pytest.raises(DependencyUnavailable, match="cannot be checked"):
            await look_up(keys, "k2")
    assert [each["log_level"] for each in logs if each["event"] == "redis_is_empty"] == ["error"]
    assert keys.redis_state == "empty"
    await admin.add("other", {}, "k2")
    assert (await look_up(keys, "k2")).tenant_id == "other"
    assert keys.redis_state == "ok"


async def test_redis_without_any_tenant_is_new(store: RedisStore) -> None:
    keys = ApiKeys(store, ManualClock())
    with structlog.testing.capture_logs() as logs:
        await keys.poll_redis()
    assert [(each["event"], each["log_level"]) for each in logs] == [("redis_is_new", "info")]
    assert keys.redis_state == "new"


async def test_tenants_without_a_generation_are_valid(store: RedisStore) -> None:
    """Those that an earlier release stored."""
    await store_api_key(store, "k1", "acme")
    await store.write([("DEL", GENERATION)])
    assert (await look_up(ApiKeys(store, ManualClock()), "k1")).tenant_id == "acme"


async def test_generation_is_kept_by_later_tenants(store: RedisStore) -> None:
    await store_api_key(store, "k1", "acme")
    generation = await store.get(GENERATION)
    await store_api_key(store, "k2", "other")
    assert generation and generation == await store.get(GENERATION)


async def test_concurrent_requests_share_one_lookup(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store_api_key(store, "k5", "acme")
    lookups = []
    is_answering = asyncio.Event()
    evaluate = store.evaluate

    async def counted_evaluate(script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        lookups.append(keys)
        await is_answering.wait()
        return await evaluate(script, keys, arguments)

    monkeypatch.setattr(store, "evaluate", counted_evaluate)
    keys = ApiKeys(store, ManualClock())
    first = asyncio.create_task(look_up(keys, "k5"))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(look_up(keys, "k5")) for _ in range(20)]
    await asyncio.sleep(0)
    first.cancel()  # the first client may disconnect
    await asyncio.sleep(0)
    is_answering.set()
    records = await asyncio.gather(*waiting, return_exceptions=True)
    assert {record.tenant_id for record in records} == {"acme"}
    assert len(lookups) == 1


async def test_key_of_missing_tenant_raises_unknown_tenant(store: RedisStore) -> None:
    await store_api_key(store, "k1", "acme")
    await store.write([("HDEL", TENANTS, "acme")])
    with pytest.raises(UnknownTenant, match="acme"):
        await look_up(ApiKeys(store, ManualClock()), "k1")


@pytest.mark.parametrize(
    "command",
    [
        ("HSET", TENANTS, "acme", "{"),
        ("HSET", TENANTS, "acme", '{"tenant_id":"other"}'),
        ("HSET", TENANTS, "acme", '{"tenant_id":"acme","concurrency":-1}'),
        ("HSET", api_key_record(digest_of("k1")), "expires_at", "soon"),
        ("HSET", api_key_record(digest_of("k1")), "key_id", b"\xff"),
        ("SET", api_key_record(digest_of("k1")), "text"),
    ],
)
async def test_unreadable_record_affects_its_own_tenant_only(
    store: RedisStore, command: Sequence[str | bytes]
) -> None:
    clock = ManualClock()
    keys = ApiKeys(store, clock)
    for key, tenant in (("k1", "acme"), ("k2", "sound")):
        await store_api_key(store, key, tenant)
        await look_up(keys, key)
    await store.write([command])
    clock.time += REFRESH_S
    with pytest.raises(DependencyUnavailable, match="unreadable"):
        await look_up(keys, "k1")
    assert (await look_up(keys, "k2")).tenant_id == "sound"


# ── tenant administration ────────────────────────────────────────────────────────────────────────


async def test_add_rejects_existing_tenant_and_invalid_values(admin: TenantAdmin) -> None:
    await admin.add("acme", {"requests_per_min": 5}, "k1")
    with pytest.raises(ConfigError, match="exists"):
        await admin.add("acme", {}, "k2")
    assert (await admin.one("acme")).requests_per_min == 5
    assert len(await admin.keys("acme")) == 1
    for tenant_id in ("", "a:b", "-a", "ä", "a b", "a\n", "a" * 129):
        with pytest.raises(ConfigError, match="invalid tenant id"):
            await admin.add(tenant_id, {}, "k")
    for changes in ({"concurrency": -1}, {"weight": 0.0}, {"priority": 5}, {"concurrency": "1"}):
        with pytest.raises(ConfigError, match="invalid tenant limits"):
            await admin.add("other", changes, "k")
    assert list(await admin.all()) == ["acme"]


async def test_unknown_tenants_and_keys_are_rejected(admin: TenantAdmin) -> None:
    await admin.add("acme", {}, "k1")
    for action in (
        admin.one("nobody"),
        admin.change("nobody", {"weight": 2.0}),
        admin.rotate("nobody", "k", keep_s=0, key_id=None),
        admin.revoke("nobody", None),
    ):
        with pytest.raises(ConfigError, match="tenant 'nobody' does not exist"):
            await action
    with pytest.raises(ConfigError, match="no key 'x'"):
        await admin.revoke("acme", "x")


async def test_concurrent_changes_are_all_retained(
    store: RedisStore, admin: TenantAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    await admin.add("acme", {}, "k1")
    names = ("requests_per_min", "input_tokens_per_min", "output_tokens_per_min", "concurrency")
    await asyncio.gather(*(admin.change("acme", {name: 3}) for name in names))
    record = await admin.one("acme")
    assert [getattr(record, name) for name in names] == [3, 3, 3, 3]


async def test_unreadable_tenant_does_not_hide_others(
    store: RedisStore, admin: TenantAdmin
) -> None:
    await admin.add("acme", {}, "k1")
    await store.write([("HSET", TENANTS, "broken", "{")])
    assert [(name, each is None) for name, each in (await admin.all()).items()] == [
        ("acme", False),
        ("broken", True),
    ]
    with pytest.raises(ConfigError, match="unreadable"):
        await admin.one("broken")


async def test_simulated_look_up_equals_redis(store: RedisStore) -> None:
    memory = MemoryStore()
    found: list[list[Any]] = []
    for each in (store, memory):
        assert isinstance(each, RedisStore | MemoryStore)
        await store_api_key(each, "k1", "acme")
        found.append(await _looked_up(each))
    assert found[0] == found[1]


async def _looked_up(store: Store) -> list[Any]:
    replies = []
    for key in ("k1", "no"):
        names = [api_key_record(digest_of(key)), TENANTS, GENERATION]
        flat, tenant, _, has_records = await store.evaluate(LOOK_UP, names, [])
        replies.append((dict(zip(flat[::2], flat[1::2], strict=True)), tenant, has_records))
    replies.append(await store.hash_get(keys_of("acme")))
    return replies
