from __future__ import annotations

import asyncio

import msgspec
import pytest

from shared.clock import MonotonicClock
from shared.store import RedisStore, Store
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import (
    MAX_BYTES_PER_TENANT,
    AllPrefixesFull,
    Entry,
    PinnedPrefix,
    PrefixStorageFull,
    TooManyPrefixes,
)
from shared.tenancy.tenant import TENANTS, TenantRecord
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S
from tests.support.world.clock import run
from tests.support.world.store import MemoryStore

NOW = 1_000.0


def make_prefix(name: str = "rules", tenant_id: str = "t", **fields: object) -> PinnedPrefix:
    default = PinnedPrefix(
        name=name,
        tenant_id=tenant_id,
        model="m",
        messages=[],
        created_at=900,
        token_ids=b"\1\0\0\0\2\0\0\0",
    )
    return msgspec.structs.replace(default, **fields)


async def check_life_cycle(store: Store) -> None:
    """Saves, reads, replaces and deletes a prefix. Each change is one of its tenant alone."""
    before = (await pinned_prefix.changes(store)).version
    prefix = make_prefix("life")
    await pinned_prefix.save(store, prefix, NOW)
    assert await pinned_prefix.load(store, "t", "life") == prefix
    other = make_prefix("life", expires_at=5_000, messages=[{"role": "system", "content": "Hi."}])
    await pinned_prefix.save(store, other, NOW)
    assert await pinned_prefix.entries(store, "t") == {"life": Entry(other.digest, "m", 2, 5_000)}
    assert await pinned_prefix.load(store, "t", "life", other.digest) == other
    assert await pinned_prefix.load(store, "t", "life", prefix.digest) is None
    assert "t" in [each async for each in pinned_prefix.tenants(store)]
    assert await pinned_prefix.load(store, "somebody", "life") is None
    await pinned_prefix.save(store, make_prefix("more"), NOW)
    await pinned_prefix.delete(store, "t", "life")
    assert await pinned_prefix.load(store, "t", "life") is None
    assert list(await pinned_prefix.entries(store, "t")) == ["more"]
    assert "t" in [each async for each in pinned_prefix.tenants(store)]
    await pinned_prefix.delete(store, "t", "more")
    assert "t" not in [each async for each in pinned_prefix.tenants(store)]
    changes = await pinned_prefix.changes(store, before)
    assert changes == pinned_prefix.Changes(before + 5, ["t"])
    await pinned_prefix.record_change(store, "u")
    assert await pinned_prefix.changes(store, before + 5) == pinned_prefix.Changes(
        before + 6, ["u"]
    )
    assert await pinned_prefix.changes(store, before + 6) == pinned_prefix.Changes(before + 6, [])
    assert (await pinned_prefix.changes(store, before + 7)).tenants is None  # Redis is another one
    await pinned_prefix.explain(store, "t", {"life": "full"})
    assert await pinned_prefix.reasons(store, "t") == {}, "of a prefix that is no more"
    for name in ("life", "other"):
        await pinned_prefix.save(store, make_prefix(name), NOW)
    await pinned_prefix.explain(store, "t", {"life": "full", "more": ""})
    assert await pinned_prefix.reason_of(store, "t", "life") == "full"
    await pinned_prefix.explain(store, "t", {"life": ""})
    assert await pinned_prefix.reason_of(store, "t", "life") is None
    for change in (
        pinned_prefix.save(store, prefix, NOW),
        pinned_prefix.delete(store, "t", "life"),
    ):
        await pinned_prefix.explain(store, "t", {"life": "full", "other": "full"})
        await change
        assert await pinned_prefix.reasons(store, "t") == {"other": "full"}


async def check_changes_since(store: Store) -> None:
    """What a process has read is neither replaced nor deleted by it after a change of another."""
    text, tokenized = make_prefix("since", "c", token_ids=b""), make_prefix("since", "c")
    assert not await pinned_prefix.save(store, tokenized, NOW, replaces=text.digest)
    assert await pinned_prefix.entries(store, "c") == {}
    await pinned_prefix.save(store, text, NOW)
    assert await pinned_prefix.save(store, tokenized, NOW, replaces=text.digest)
    assert not await pinned_prefix.save(store, text, NOW, replaces=text.digest)
    await pinned_prefix.delete(store, "c", "since", text.digest)
    assert await pinned_prefix.load(store, "c", "since") == tokenized
    await pinned_prefix.delete(store, "c", "since", tokenized.digest)
    assert await pinned_prefix.load(store, "c", "since") is None


def test_life_cycle_in_memory() -> None:
    store = MemoryStore()
    run(check_life_cycle(store))
    run(check_changes_since(store))


async def test_life_cycle_in_redis(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=LIMIT_S)
    await check_life_cycle(store)
    await check_changes_since(store)
    await store.close()


async def check_permissions(store: Store) -> None:
    """A prefix follows its tenant's record of now; without one, as of the public tenant, none."""
    prefix = make_prefix("house", "strict")
    owner = TenantRecord(tenant_id="strict", created_at=NOW)
    for fields, is_saved in (
        ({"allowed_regions": ["eu"]}, True),
        ({"allowed_regions": ["us"]}, False),
        ({"allowed_regions": []}, False),
        ({"region_class": "europe"}, True),
        ({"region_class": "world"}, False),
        ({"region_class": "europe", "allowed_regions": ["us"]}, False),
        ({"is_zero_retention": True}, False),
        ({"created_at": NOW + 1}, False),
        ({}, True),
    ):
        data = msgspec.json.encode({"tenant_id": "strict", "created_at": NOW, **fields})
        await store.write([("HSET", TENANTS, "strict", data)])
        where = {"owner": owner, "region": "eu", "region_classes": ("asia", "europe")}
        assert await pinned_prefix.save(store, prefix, NOW, **where) is is_saved
        assert bool(await pinned_prefix.entries(store, "strict")) is is_saved
        await pinned_prefix.delete(store, "strict", "house")
    public = make_prefix("house", "")
    assert await pinned_prefix.save(store, public, NOW, owner=owner, region="eu")
    await pinned_prefix.delete(store, "", "house")


def test_permissions_in_memory() -> None:
    run(check_permissions(MemoryStore()))


async def test_permissions_in_redis(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=LIMIT_S)
    await check_permissions(store)
    await store.write([("HDEL", TENANTS, "strict")])
    await store.close()


async def check_limits(store: Store) -> None:
    """A save beyond a limit changes nothing; a replacement, and what follows a delete, is saved."""
    text = "x" * (MAX_BYTES_PER_TENANT // 2 - 1_000)
    large = make_prefix("large", "full", messages=[{"role": "system", "content": text}])
    await pinned_prefix.save(store, large, NOW)
    await pinned_prefix.save(store, large, NOW)
    await pinned_prefix.save(store, msgspec.structs.replace(large, name="other"), NOW)
    version = await store.get(pinned_prefix.VERSION_KEY)
    third = msgspec.structs.replace(large, name="third", messages=[{"content": "x" * 2_000}])
    with pytest.raises(PrefixStorageFull):
        await pinned_prefix.save(store, third, NOW)
    with pytest.raises(TooManyPrefixes):
        await pinned_prefix.save(store, make_prefix("third", "full"), NOW, max_prefixes=2)
    assert await store.get(pinned_prefix.VERSION_KEY) == version
    assert list(await pinned_prefix.entries(store, "full")) == ["large", "other"]
    assert await pinned_prefix.load(store, "full", "third") is None
    await pinned_prefix.save(store, make_prefix("other", "full"), NOW, max_prefixes=2)
    await pinned_prefix.save(store, third, NOW)
    for name in ("large", "other", "third"):
        await pinned_prefix.delete(store, "full", name)


def test_limits_in_memory() -> None:
    run(check_limits(MemoryStore()))


async def test_limits_in_redis(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=10.0)
    await check_limits(store)
    await store.close()


async def check_bound_of_all(store: Store) -> None:
    """Prefixes of all tenants have one bound, and each tenant a share; those that are deleted,
    replaced or over leave it.
    """
    text = "x" * 8_000
    for each, expires_at in (("a", None), ("b", 2_000), ("c", 2_000), ("e", None)):
        prefix = make_prefix("p", each, messages=[{"content": text}], expires_at=expires_at)
        await pinned_prefix.save(store, prefix, NOW, max_all_bytes=40_000)
    more = make_prefix("more", "d", messages=[{"content": text}])
    with pytest.raises(PrefixStorageFull, match="10000 bytes"):
        await pinned_prefix.save(
            store, make_prefix("p2", "e", messages=[{"content": text}]), NOW, max_all_bytes=40_000
        )
    with pytest.raises(AllPrefixesFull) as full:
        await pinned_prefix.save(store, more, NOW, max_all_bytes=40_000)
    assert full.value.http_status == 507 and not await pinned_prefix.entries(store, "d")
    again = make_prefix("p", "a", messages=[{"content": text}])
    await pinned_prefix.save(store, again, NOW, max_all_bytes=40_000)
    await pinned_prefix.delete(store, "a", "p")
    await pinned_prefix.save(store, more, NOW, max_all_bytes=40_000)
    await pinned_prefix.save(store, make_prefix("operators", ""), NOW)  # operators have no bound
    with pytest.raises(AllPrefixesFull):
        await pinned_prefix.save(store, again, NOW, max_all_bytes=40_000)
    await pinned_prefix.save(store, again, NOW + 2_000, max_all_bytes=40_000)
    for tenant_id in ("", "a", "b", "c", "d", "e"):
        await pinned_prefix.delete_all(store, tenant_id)
    assert dict(await store.hash_get(pinned_prefix.SIZES_KEY)) == {b"total": b"0"}
    assert not await store.sorted_set_size(pinned_prefix.ENDS_KEY)


def test_bound_of_all_in_memory() -> None:
    run(check_bound_of_all(MemoryStore()))


async def test_bound_of_all_in_redis(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=10.0)
    await store.write([("DEL", pinned_prefix.SIZES_KEY, pinned_prefix.ENDS_KEY)])
    await check_bound_of_all(store)
    await store.close()


async def test_concurrent_saves_do_not_exceed_the_limit(redis_server: RedisServer) -> None:
    """From two connections, as two gateways do."""
    stores = [RedisStore(redis_server.url, MonotonicClock(), timeout_s=10.0) for _ in range(2)]

    async def save(number: int) -> bool:
        try:
            await pinned_prefix.save(stores[number % 2], make_prefix(f"p{number}", "many"), NOW)
        except TooManyPrefixes:
            return False
        return True

    saved = await asyncio.gather(*map(save, range(120)))
    entries = await pinned_prefix.entries(stores[0], "many")
    assert sum(saved) == len(entries) == pinned_prefix.MAX_PER_TENANT
    for name in entries:
        await pinned_prefix.delete(stores[0], "many", name)
    for store in stores:
        await store.close()


async def test_all_tenants_are_found_however_many(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=10.0)
    ids = [f"many-{number}" for number in range(1_200)]
    known = (await pinned_prefix.changes(store)).version
    for first in range(0, len(ids), 40):  # connections
        saves = (
            pinned_prefix.save(store, make_prefix("p", each), NOW)
            for each in ids[first : first + 40]
        )
        await asyncio.gather(*saves)
    await pinned_prefix.save(store, make_prefix("p", ids[0], created_at=2_000), NOW)  # renewed
    assert set(ids) <= {each async for each in pinned_prefix.tenants(store)}
    changes = await pinned_prefix.changes(store, known)
    assert changes.tenants is not None and set(changes.tenants) == set(ids)
    for each in ids:
        await pinned_prefix.delete_all(store, each)
    assert not set(ids) & {each async for each in pinned_prefix.tenants(store)}
    await store.close()


def test_text_expires_with_prefix() -> None:
    store = MemoryStore()
    run(pinned_prefix.save(store, make_prefix(expires_at=1_060), NOW))
    assert store.time_to_live_s["hearth:t:pinned_prefix:rules"] == 60
    entry = run(pinned_prefix.entries(store, "t"))["rules"]
    assert [entry.is_over(at) for at in (1_059.0, 1_060.0)] == [False, True]


def test_every_field_changes_the_digest() -> None:
    changes: list[dict[str, object]] = [
        {"token_ids": b""},
        {"messages": [{"role": "system", "content": "x"}]},
        {"tools": [{"type": "function"}]},
        {"cache_salt": "s"},
        {"expires_at": 5},
    ]
    digests = {msgspec.structs.replace(make_prefix(), **change).digest for change in changes}
    assert len(digests | {make_prefix().digest}) == len(changes) + 1


@pytest.mark.parametrize("data", [b"", b"\xff\xff", b"\xc0", msgspec.msgpack.encode({"name": 3})])
def test_unreadable_records_are_ignored(data: bytes) -> None:
    store = MemoryStore()
    run(pinned_prefix.save(store, make_prefix("good"), NOW))
    store.data["hearth:t:pinned_prefixes"][b"bad"] = data
    store.data["hearth:t:pinned_prefix:bad"] = data
    assert list(run(pinned_prefix.entries(store, "t"))) == ["good"]
    assert run(pinned_prefix.load(store, "t", "bad")) is None


def test_record_of_another_tenant_is_ignored() -> None:
    store = MemoryStore()
    run(pinned_prefix.save(store, make_prefix("good"), NOW))
    store.data["hearth:u:pinned_prefix:good"] = store.data["hearth:t:pinned_prefix:good"]
    assert run(pinned_prefix.load(store, "u", "good")) is None
