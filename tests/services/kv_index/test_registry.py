from __future__ import annotations

import pytest

from services.kv_index import registry as registry_module
from services.kv_index.registry import PrefixRegistry
from shared.clock import MonotonicClock
from shared.store import RedisStore, Store
from tests.servers import RedisServer
from tests.simulation.clock import run
from tests.simulation.store import MemoryStore


class WallClock:
    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def block(number: int) -> bytes:
    return number.to_bytes(16, "big")


def registry_on(store: Store, max_per_tenant: int = 3) -> PrefixRegistry:
    return PrefixRegistry(store, WallClock(), max_per_tenant=max_per_tenant, ttl_s=60)


def store_run(
    registry: PrefixRegistry, number: int, worker_id: str = "w0", tenant: str = "t"
) -> None:
    registry.stored(
        worker_id,
        tenant_id=tenant,
        model="m",
        revision="r1",
        num_tokens=16 * number,
        tip_hash=block(number),
    )


def key(number: int, tenant: str = "t") -> str:
    return f"hearth:{tenant}:prefix:{block(number).hex()}"


def test_a_record_says_what_is_known() -> None:
    store = MemoryStore()
    registry = registry_on(store)
    store_run(registry, 4, "w1")
    store_run(registry, 4, "w0")
    registry.matched("t", [block(1), block(4), block(5)], 3)
    registry.matched("t", [block(1), block(4), block(5)], 1)  # no known tip so early
    registry.matched("other", [block(4)], 1)  # not its record
    assert run(registry.flush())
    assert store.data[key(4)] == {
        b"model": b"m",
        b"revision": b"r1",
        b"num_tokens": b"64",
        b"holders": b"w0,w1",
        b"hits": b"1",
        b"last_use": b"1003",
    }
    assert store.time_to_live_s[key(4)] == 60
    assert store.data["hearth:t:prefixes"] == {block(4).hex().encode(): 1003.0}
    assert store.num_writes == 1


def test_holders_follow_removal_clearing_and_loss() -> None:
    store = MemoryStore()
    registry = registry_on(store)
    for worker_id in ("w0", "w1", "w2"):
        store_run(registry, 1, worker_id)
        store_run(registry, 2, worker_id)
    registry.removed("w0", block(1) + block(7))
    registry.cleared("w1")
    run(registry.flush())
    assert store.data[key(1)][b"holders"] == b"w2"
    assert store.data[key(2)][b"holders"] == b"w0,w2"


def test_the_least_recently_used_go_beyond_the_bound() -> None:
    store = MemoryStore()
    registry = registry_on(store, max_per_tenant=3)
    for number in (1, 2, 3):
        store_run(registry, number)
    run(registry.flush())
    registry.matched("t", [block(1)], 1)
    store_run(registry, 4)
    store_run(registry, 9, tenant="other")
    run(registry.flush())
    assert sorted(store.data["hearth:t:prefixes"]) == [
        block(number).hex().encode() for number in (1, 3, 4)
    ]
    assert key(2) not in store.data
    assert key(9, "other") in store.data


def test_redis_away_and_back_loses_no_hit() -> None:
    store = MemoryStore()
    registry = registry_on(store)
    store_run(registry, 1)
    registry.matched("t", [block(1)], 1)
    store.is_away = True
    assert not run(registry.flush())
    registry.matched("t", [block(1)], 1)
    store_run(registry, 2)
    assert not run(registry.flush())
    assert registry.num_pending == 2
    store.is_away = False
    assert run(registry.flush())
    assert store.data[key(1)][b"hits"] == b"2"
    assert registry.num_pending == 0


def test_the_buffer_drops_the_oldest_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_PENDING", 5)
    store = MemoryStore()
    store.is_away = True
    registry = registry_on(store, max_per_tenant=100)
    for number in range(8):
        store_run(registry, number)
    run(registry.flush())
    assert (registry.num_pending, registry.num_dropped) == (5, 3)
    store.is_away = False
    run(registry.flush())
    assert set(store.data) == {key(number) for number in range(3, 8)} | {"hearth:t:prefixes"}


def test_tenants_beyond_the_bound_are_forgotten_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_TENANTS", 2)
    registry = registry_on(MemoryStore())
    for number in range(5):
        store_run(registry, number, tenant=f"t{number}")
    assert sorted(registry._records) == [block(3), block(4)]
    assert registry._held_by == {"w0": {block(3), block(4)}}


async def test_on_a_real_redis(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=2.0)
    registry = registry_on(store, max_per_tenant=2)
    for number in (1, 2, 3):
        store_run(registry, number, tenant="real")
    registry.matched("real", [block(3)], 1)
    assert await registry.flush()
    assert await store.hash_get(key(1, "real")) == {}
    record = await store.hash_get(key(3, "real"))
    assert (record[b"hits"], record[b"num_tokens"]) == (b"1", b"48")
    newest = [block(2).hex().encode(), block(3).hex().encode()]
    assert await store.sorted_set_head("hearth:real:prefixes", 9) == newest
    await store.close()


async def test_an_older_process_left_more_than_the_bound(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=2.0)
    for number in (1, 2, 3):
        older = registry_on(store, max_per_tenant=100)
        store_run(older, number, tenant="old")
        await older.flush()
    registry = registry_on(store, max_per_tenant=2)
    registry._now = lambda: 5_000.0
    store_run(registry, 4, tenant="old")
    await registry.flush()
    assert len(await store.sorted_set_head("hearth:old:prefixes", 9)) == 2
    await store.close()
