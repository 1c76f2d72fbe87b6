"""What comes late of a removed tenant stays nowhere, and is not a later tenant's of its name."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest

from services.gateway.dialects.responses.storage.record import ResponseRecord
from services.gateway.dialects.responses.storage.store import ResponseStore
from services.gateway.tenancy.usage_counter import UsageCounter, day_of
from shared.clock import MonotonicClock
from shared.errors import ConfigError, InvalidRequest, Overloaded
from shared.messages import SignedCopy
from shared.store import RedisStore
from shared.tenancy.deletion import kv_drops, site_drops
from shared.tenancy.deletion.kv_drops import DropProgress
from shared.tenancy.deletion.tenant_removal import (
    REMOVAL_S,
    TenantRemoval,
    TenantWithdrawal,
    removing,
)
from shared.tenancy.home_tenants import read_home_tenants, record_totals
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import PinnedPrefix
from shared.tenancy.site_usage import TENANT_SITES, USAGE_UNSENT, usage_at
from shared.tenancy.tenant import TENANT_COPIES, TenantRecord, api_key_record, keys_of, usage_of
from shared.tenancy.tenant_admin import TenantAdmin
from shared.tenancy.tenant_copy import SITES, TENANT_VERSIONS, SigningKey, TenantCopy
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S

KEY = SigningKey.of_secret("secret")


class Operator:
    """An operator of a real Redis, who may be overtaken by another one."""

    def __init__(self, redis: RedisServer) -> None:
        self.now = 1_700_000_000.5
        self.store = RedisStore(redis.url, MonotonicClock(), timeout_s=LIMIT_S)
        self.admin = TenantAdmin(self, lambda: self.now)
        self.removal = TenantRemoval(self.store, lambda: self.now)
        self.overtaken: Callable[[], Awaitable[None]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def evaluate(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        if self.overtaken is not None and "HSET" in script:
            overtaken, self.overtaken = self.overtaken, None
            await overtaken()
        return await self.store.evaluate(script, keys, arguments)

    async def remove(self, tenant_id: str, *, with_usage: bool = False) -> None:
        """Removes a tenant, and lets all workers have dropped its KV a while ago."""
        drop = await self.removal.remove(tenant_id, with_usage=with_usage)
        await self.removal.finish(drop)
        await kv_drops.report(self.store, drop.number, DropProgress(finished_at=self.now))
        await self.pass_removal(tenant_id)

    async def pass_removal(self, tenant_id: str) -> None:
        """Ends the time until which the requests of a removed tenant end."""
        await self.store.write([("DEL", removing(tenant_id))])
        self.now += REMOVAL_S + 1

    async def copy(self, record: TenantRecord) -> TenantRecord:
        """Stores a copy of a tenant of site a, as a gateway of site b does."""
        copy = TenantCopy(home="a", site="b", version=1, record=record)
        signed: SignedCopy = KEY.sign(copy)
        name, data = f"a/{record.tenant_id}", msgspec.msgpack.encode(signed)
        await self.store.write([("HSET", TENANT_COPIES, name, data)])
        return msgspec.structs.replace(record, tenant_id=name)


@pytest.fixture
async def operator(redis_server: RedisServer) -> AsyncIterator[Operator]:
    operator = Operator(redis_server)
    await operator.store.write([("FLUSHALL",)])
    yield operator
    await operator.store.close()


def usage_counter(operator: Operator, writer_id: str) -> UsageCounter:
    return UsageCounter(
        operator.store, MonotonicClock(), writer_id=writer_id, now=lambda: operator.now
    )


async def requests_of(operator: Operator, tenant_id: str) -> int:
    fields = await operator.store.hash_get(usage_of(tenant_id, day_of(operator.now)))
    return int(fields.get(b"requests:m", 0))


@pytest.mark.parametrize("with_usage", [True, False])
async def test_usage_of_a_frozen_gateway_is_deleted_with_that_before(
    operator: Operator, *, with_usage: bool
) -> None:
    first = await operator.admin.add("acme", {}, "key 1")
    frozen, usage = (usage_counter(operator, name) for name in ("frozen", "other"))
    for each in (frozen, usage):
        each.count(first, "m", {"requests": 1})
    assert await usage.flush()
    await operator.remove("acme", with_usage=with_usage)
    assert await frozen.flush() and frozen.num_pending == 0
    kept = 0 if with_usage else 2
    assert await requests_of(operator, "acme") == kept
    later = await operator.admin.add("acme", {}, "key 2")
    for counter, record in ((frozen, first), (usage, later)):
        counter.count(record, "m", {"requests": 1})
        assert await counter.flush()
    assert await requests_of(operator, "acme") == (1 if with_usage else 4)


async def test_usage_is_deleted_by_a_repeated_removal_and_of_any_number_of_sites(
    operator: Operator,
) -> None:
    sites = [f"site-{number}" for number in range(40)]
    await operator.store.write([("HSET", SITES, *(part for each in sites for part in (each, "")))])
    record = await operator.admin.add("acme", {"sites": sites}, "key")
    keys = [usage_at("acme", day_of(operator.now), each) for each in sites]
    await operator.store.write([("HSET", each, "requests:m", 1) for each in keys])
    frozen = usage_counter(operator, "frozen")
    frozen.count(record, "m", {"requests": 1})
    await operator.removal.remove("acme", with_usage=False)
    drop = await operator.removal.remove("acme", with_usage=True)
    assert (drop.with_usage, drop.created_at) == (True, record.created_at)
    assert await frozen.flush()
    found = await operator.removal.whereabouts("acme", ())
    assert not any(found.records.values())
    assert not await operator.store.hash_get(TENANT_SITES)
    assert not any([await operator.store.hash_get(each) for each in keys])


async def test_usage_at_another_site_is_deleted_once(operator: Operator) -> None:
    """Also of a tenant that this site has no copy of any more; a repeated order, which may come
    late, deletes nothing of a later tenant.
    """
    usage = usage_counter(operator, "gateway")
    first = TenantRecord(tenant_id="a/acme", created_at=1.5)
    later = msgspec.structs.replace(first, created_at=2.5)
    withdrawal = TenantWithdrawal(operator.store, lambda: operator.now)
    usage.count(first, "m", {"requests": 1})
    assert await usage.flush() and await operator.store.hash_get(USAGE_UNSENT)
    await withdrawal.delete("a/acme", "regions")
    assert await requests_of(operator, "a/acme") == 1, "its home gets it"
    for _ in range(2):
        await withdrawal.delete_usage("a/acme", [1.5])
        for each in (first, later):
            usage.count(each, "m", {"requests": 1})
        assert await usage.flush()
    assert await requests_of(operator, "a/acme") == 2


async def test_late_totals_of_a_removed_tenant_are_not_a_later_ones(operator: Operator) -> None:
    """A link is cut while a tenant is removed with its usage, and added again. Its site reports
    what it has of the first one before it hears of the removal.
    """
    await operator.store.write([("HSET", SITES, "b", "")])
    day, now = day_of(operator.now), operator.now

    async def report(requests: int) -> None:
        totals = [("requests:m", requests)]
        await record_totals(operator.store, "acme", "b", day, totals, now)

    await operator.admin.add("acme", {"sites": ("b",)}, "key 1")
    await report(100)
    await operator.remove("acme", with_usage=True)
    with pytest.raises(InvalidRequest, match="has named this site"):
        await report(110)
    await operator.admin.add("acme", {"sites": ("b",)}, "key 2")
    for _ in range(2):
        with pytest.raises(Overloaded, match="has not deleted"):
            await report(110)
    last = await kv_drops.last_number(operator.store)
    assert await site_drops.confirm(operator.store, "b", last)
    await report(1)
    found = await operator.store.hash_get(usage_at("acme", day, "b"))
    assert found == {b"requests:m": b"1"}


async def stored(operator: Operator, tenant: TenantRecord) -> tuple[bool, str]:
    """Whether a prefix, and what of a response, is stored by a request that began with a record."""
    outcomes: list[str] = []
    responses = ResponseStore(
        operator.store,
        MonotonicClock(),
        region="",
        now=time.time,
        count=outcomes.append,
        max_all_bytes=lambda: 1 << 20,
    )
    responses.save(tenant, ResponseRecord(id="resp_late", response=b'{"output": []}'))
    await responses.stop()
    prefix = PinnedPrefix(
        name="late", tenant_id=tenant.tenant_id, model="m", messages=[], created_at=1
    )
    is_saved = await pinned_prefix.save(operator.store, prefix, 1_000.0, owner=tenant)
    return is_saved, outcomes[0]


async def test_late_text_is_not_stored_for_a_later_tenant(operator: Operator) -> None:
    first = await operator.admin.add("acme", {}, "key 1")
    await operator.remove("acme")
    assert await stored(operator, first) == (False, "forbidden")
    later = await operator.admin.add("acme", {}, "key 2")
    assert await stored(operator, first) == (False, "forbidden")
    assert await stored(operator, later) == (True, "stored")


@pytest.mark.parametrize("size", [0, 300])
async def test_late_text_of_another_sites_tenant_follows_its_copy(
    operator: Operator, size: int
) -> None:
    """Whatever the gateway that stores it has in memory, and however long the copy is."""
    models = tuple("m" * 255 for _ in range(size // 255))
    record = TenantRecord(tenant_id="acme", created_at=1.5, allowed_models=models)
    first = msgspec.structs.replace(record, tenant_id="a/acme")
    assert await stored(operator, first) == (False, "forbidden")
    assert await operator.copy(record) == first
    assert await stored(operator, first) == (True, "stored")
    for change in (
        {"is_zero_retention": True},
        {"created_at": 2.5},
        {"allowed_regions": ("eu",)},
    ):
        await operator.copy(msgspec.structs.replace(record, **change))
        assert await stored(operator, first) == (False, "forbidden"), change


async def test_key_that_comes_late_brings_no_tenant_back(operator: Operator) -> None:
    """Another operator removes the tenant while a command runs on it."""
    admin = operator.admin

    async def removed() -> None:
        operator.overtaken = None
        await operator.remove("acme")

    async def client() -> None:
        await admin.add_client("acme", "billing")

    async def rotated() -> None:
        await admin.rotate("acme", "key 3", keep_s=0.0, key_id=None)

    async def api_key() -> None:
        await admin.add_key("acme", "key 3")

    for command in (client, rotated, api_key):
        await admin.add("acme", {"is_zero_retention": True}, "key 1")
        operator.overtaken = removed
        with pytest.raises(ConfigError, match="'acme' does not exist"):
            await command()
        assert "acme" not in await admin.all()
        for key in (keys_of("acme"), api_key_record("client:billing")):
            assert not await operator.store.hash_get(key)


async def test_no_command_brings_a_tenant_back_before_its_requests_have_ended(
    operator: Operator,
) -> None:
    await operator.admin.add("acme", {"is_zero_retention": True}, "key 1")
    await operator.removal.remove("acme", with_usage=False)
    with pytest.raises(ConfigError, match="is being removed"):
        await operator.admin.add_key("acme", "key 2")
    assert await operator.admin.all() == {}


@pytest.mark.parametrize("behind_s", [3600.0, -3600.0])
async def test_a_tenant_is_added_again_whatever_time_another_operator_has(
    operator: Operator, behind_s: float
) -> None:
    elsewhere = TenantAdmin(operator.store, lambda: operator.now - behind_s)
    await elsewhere.add("acme", {}, "key 1")
    drop = await operator.removal.remove("acme", with_usage=False)
    await kv_drops.report(operator.store, drop.number, DropProgress(finished_at=operator.now))
    with pytest.raises(ConfigError, match="is being removed"):
        await elsewhere.add("acme", {}, "key 2")
    ends = "return redis.call('TTL', KEYS[1])"
    assert 0 < await operator.store.evaluate(ends, [removing("acme")], []) <= REMOVAL_S
    await operator.pass_removal("acme")
    await elsewhere.add("acme", {}, "key 2")


async def test_gateway_that_is_late_gives_no_version_to_a_removed_tenant(
    operator: Operator,
) -> None:
    await operator.store.write([("HSET", SITES, "b", "")])
    await operator.admin.add("other", {"sites": ("b",)}, "key 1")
    await operator.admin.add("acme", {"sites": ("b",)}, "key 2")

    async def removed() -> None:
        await operator.remove("acme")

    operator.overtaken = removed
    (home,) = await read_home_tenants(operator)
    assert home.record.tenant_id == "other"
    assert [*await operator.store.hash_get(TENANT_VERSIONS)] == [b"other"]
