from __future__ import annotations

import msgspec
import pytest

from shared.clock import MonotonicClock
from shared.store import RedisStore, Store
from shared.tenancy import pinned_prefix
from shared.tenancy.pinned_prefix import Entry, PinnedPrefix
from tests.servers import RedisServer
from tests.simulation.world.clock import run
from tests.simulation.world.store import MemoryStore

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
    """Saves, reads, replaces and deletes a prefix. Each change increments the version."""
    before = await store.get(pinned_prefix.VERSION_KEY)
    prefix = make_prefix("life")
    await pinned_prefix.save(store, prefix, NOW)
    assert await pinned_prefix.load(store, "t", "life") == prefix
    other = make_prefix("life", expires_at=5_000, messages=[{"role": "system", "content": "Hi."}])
    await pinned_prefix.save(store, other, NOW)
    assert await pinned_prefix.entries(store, "t") == {"life": Entry(other.digest, "m", 2, 5_000)}
    assert "t" in await pinned_prefix.tenants(store)
    assert await pinned_prefix.load(store, "somebody", "life") is None
    await pinned_prefix.delete(store, "t", "life")
    assert await pinned_prefix.load(store, "t", "life") is None
    assert await pinned_prefix.entries(store, "t") == {}
    assert int(await store.get(pinned_prefix.VERSION_KEY) or 0) == int(before or 0) + 3


def test_life_cycle_in_memory() -> None:
    store = MemoryStore()
    run(check_life_cycle(store))


async def test_life_cycle_in_redis(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=2.0)
    await check_life_cycle(store)
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
        {"allowed_regions": ("eu",)},
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
