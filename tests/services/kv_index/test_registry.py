from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from services.kv_index.registry import MAX_PER_FLUSH, PrefixRecord, PrefixRegistry
from shared.clock import MonotonicClock
from shared.store import Command, RedisStore, Store, StoreRejected
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S
from tests.support.world.clock import run
from tests.support.world.store import MemoryStore

WRITE_S = 0.25


class SlowStore(MemoryStore):
    async def write(self, commands: Sequence[Command]) -> None:
        await asyncio.sleep(WRITE_S)
        await super().write(commands)


class WallClock:
    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def block(number: int) -> bytes:
    return number.to_bytes(16, "big")


def registry_on(store: Store, max_per_tenant: int = 3, **bounds: int) -> PrefixRegistry:
    return PrefixRegistry(store, WallClock(), max_per_tenant=max_per_tenant, ttl_s=60, **bounds)


def store_run(
    registry: PrefixRegistry, number: int, worker_id: str = "w0", tenant: str = "t", after: int = 0
) -> None:
    registry.stored(
        worker_id,
        tenant_id=tenant,
        model="m",
        revision="r1",
        num_tokens=16 * number,
        num_bytes=1600 * number,
        parent_hash=block(after),
        tip_hash=block(number),
    )


def key(number: int, tenant: str = "t") -> str:
    return f"hearth:{tenant}:prefix:{block(number).hex()}"


def holders(store: MemoryStore, number: int) -> set[str]:
    names = [name.decode() for name in store.data.get(key(number), {})]
    return {each.removeprefix("holder:") for each in names if each.startswith("holder:")}


def test_record_has_sizes_holders_and_hits() -> None:
    store = MemoryStore()
    registry = registry_on(store)
    store_run(registry, 4, "w1")
    store_run(registry, 4, "w0")
    registry.matched("t", [block(1), block(4), block(5)], 3)
    registry.matched("t", [block(1), block(4), block(5)], 1)  # the first block is no known tip
    registry.matched("other", [block(4)], 1)  # another tenant's record
    assert run(registry.flush())
    assert store.data[key(4)] == {
        b"model": b"m",
        b"revision": b"r1",
        b"num_tokens": b"64",
        b"bytes": b"6400",
        b"pin": b"",
        b"holder:w0": b"1",
        b"holder:w1": b"1",
        b"hits": b"1",
        b"saved_tokens": b"64",
        b"last_use": b"1003",
    }
    assert store.time_to_live_s[key(4)] == 60
    assert store.data["hearth:t:prefixes"] == {block(4).hex().encode(): 1003.0}
    assert store.num_writes == 1


def test_growing_output_has_records_of_prompt_and_last_block() -> None:
    store = MemoryStore()
    registry = registry_on(store, max_per_tenant=9)
    store_run(registry, 1)
    for number in (2, 3, 4):
        store_run(registry, number, after=number - 1)
    assert registry.num_pending == 2
    assert run(registry.flush())
    assert set(store.data) == {key(1), key(4), "hearth:t:prefixes"}
    assert b"hits" not in store.data[key(4)]
    store_run(registry, 5, after=4)
    assert run(registry.flush())
    assert set(store.data) == {key(1), key(4), key(5), "hearth:t:prefixes"}
    registry.removed("w0", block(3) + block(4))
    run(registry.flush())
    assert holders(store, 4) == set()
    assert holders(store, 5) == {"w0"}


def test_extended_prefix_in_use_retains_its_record() -> None:
    """In use: hit by a request, held by two workers, pinned, or extended by another tenant."""
    store = MemoryStore()
    registry = registry_on(store, max_per_tenant=99)
    for first in (10, 20, 30, 40):
        store_run(registry, first)
        store_run(registry, first + 1, after=first)
    registry.matched("t", [block(10), block(11)], 2)
    store_run(registry, 21, "w1", after=20)
    registry.pin(PrefixRecord("t", block(31), "m", "r1", 0, 0, 0, pin="system"))
    for first in (10, 20, 30):
        store_run(registry, first + 2, after=first + 1)
    store_run(registry, 42, tenant="other", after=41)
    run(registry.flush())
    for number in (10, 11, 12, 20, 21, 22, 30, 31, 32, 40, 41):
        assert key(number) in store.data
    assert key(42, "other") in store.data
    assert holders(store, 21) == {"w0", "w1"}


def test_removed_and_cleared_workers_are_no_holders() -> None:
    store = MemoryStore()
    registry = registry_on(store)
    for worker_id in ("w0", "w1", "w2"):
        store_run(registry, 1, worker_id)
        store_run(registry, 2, worker_id)
    registry.removed("w0", block(1) + block(7))
    registry.cleared("w1")
    run(registry.flush())
    assert holders(store, 1) == {"w2"}
    assert holders(store, 2) == {"w0", "w2"}


def test_trim_deletes_least_recently_used_records() -> None:
    store = MemoryStore()
    registry = registry_on(store, max_per_tenant=3)
    for number in (1, 2, 3):
        store_run(registry, number)
    run(registry.flush())
    registry.matched("t", [block(1)], 1)
    store_run(registry, 4)
    store_run(registry, 9, tenant="other")
    run(registry.flush())
    run(registry.trim())
    assert sorted(store.data["hearth:t:prefixes"]) == [
        block(number).hex().encode() for number in (1, 3, 4)
    ]
    assert key(2) not in store.data
    assert key(9, "other") in store.data


def test_redis_outage_loses_no_hit() -> None:
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


def test_full_buffer_drops_and_counts_oldest_changes() -> None:
    store = MemoryStore()
    store.is_away = True
    registry = registry_on(store, max_per_tenant=100, max_pending=5)
    for number in range(8):
        store_run(registry, number)
    run(registry.flush())
    assert (registry.num_pending, registry.num_dropped) == (5, 3)
    store.is_away = False
    run(registry.flush())
    assert set(store.data) == {key(number) for number in range(3, 8)} | {"hearth:t:prefixes"}


def test_tenants_beyond_the_bound_leave_memory() -> None:
    registry = registry_on(MemoryStore(), max_tenants=2)
    for number in range(5):
        store_run(registry, number, tenant=f"t{number}")
    assert sorted(registry._records) == [block(3), block(4)]
    assert registry._held_by == {"w0": {block(3), block(4)}}


async def test_flush_and_trim_work_on_a_real_redis(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=LIMIT_S)
    registry = registry_on(store, max_per_tenant=2)
    for number in (1, 2, 3):
        store_run(registry, number, tenant="real")
    registry.matched("real", [block(3)], 1)
    assert await registry.flush()
    await registry.trim()
    assert await store.hash_get(key(1, "real")) == {}
    record = await store.hash_get(key(3, "real"))
    assert (record[b"hits"], record[b"num_tokens"]) == (b"1", b"48")
    newest = [block(2).hex().encode(), block(3).hex().encode()]
    assert await store.sorted_set_head("hearth:real:prefixes", 9) == newest
    await store.close()


async def test_trim_deletes_surplus_records_of_an_older_process(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=LIMIT_S)
    for number in (1, 2, 3):
        older = registry_on(store, max_per_tenant=100)
        store_run(older, number, tenant="old")
        await older.flush()
    registry = registry_on(store, max_per_tenant=2)
    registry._now = lambda: 5_000.0
    store_run(registry, 4, tenant="old")
    await registry.flush()
    await registry.trim()
    assert len(await store.sorted_set_head("hearth:old:prefixes", 9)) == 2
    await store.close()


def test_two_replicas_do_not_overwrite_each_other() -> None:
    """Both receive all events, at different times, and each receives half of the queries."""
    store = MemoryStore()
    first, second = registry_on(store), registry_on(store)
    for replica in (first, second):
        store_run(replica, 1, "w0")
    store_run(first, 1, "w1")
    run(first.flush())
    run(second.flush())  # it has not received w1's event yet
    assert holders(store, 1) == {"w0", "w1"}
    store_run(second, 1, "w1")
    for replica in (first, second):
        replica.matched("t", [block(1)], 1)
        replica.removed("w0", block(1))
        run(replica.flush())
    assert holders(store, 1) == {"w1"}
    assert store.data[key(1)][b"hits"] == b"2"
    assert store.data[key(1)][b"saved_tokens"] == b"32"


def test_trim_retains_records_used_by_another_replica() -> None:
    store = MemoryStore()
    first, second = registry_on(store, max_per_tenant=2), registry_on(store, max_per_tenant=2)
    for number in (1, 2):
        for replica in (first, second):
            store_run(replica, number)
            run(replica.flush())
    second._now = lambda: 5_000.0
    second.matched("t", [block(1)], 1)
    run(second.flush())
    store_run(first, 3)  # for this replica block 1 is the oldest
    run(first.flush())
    run(first.trim())
    assert key(1) in store.data
    assert key(2) not in store.data


def test_holder_removal_does_not_recreate_a_deleted_record() -> None:
    store = MemoryStore()
    registry = registry_on(store)
    store_run(registry, 1)
    run(registry.flush())
    store.data.clear()
    registry.cleared("w0")
    run(registry.flush())
    assert store.data == {"hearth:t:prefixes": {}} or store.data == {}


def test_restarted_replica_continues_the_counts() -> None:
    """In the pages that the workers send, block 1 is no longer a tip."""
    store = MemoryStore()
    before = registry_on(store)
    store_run(before, 1, "w0")
    store_run(before, 1, "w1")
    store_run(before, 2, "w0")
    before.matched("t", [block(1)], 1)
    run(before.flush())
    after = registry_on(store)
    store_run(after, 2, "w0")
    run(after.recover(lambda worker_id, _: worker_id == "w0"))  # w1 was lost meanwhile
    after.matched("t", [block(1), block(7)], 1)
    run(after.flush())
    assert store.data[key(1)][b"hits"] == b"2"
    assert holders(store, 1) == {"w0"}
    after.removed("w0", block(1))
    run(after.flush())
    assert holders(store, 1) == set()


def test_records_of_a_dropped_tenant_do_not_return() -> None:
    """Those of a batch that Redis did not take before, and of a prefix that was still pinned."""
    store = SlowStore()
    registry = registry_on(store)
    store_run(registry, 4)
    store_run(registry, 5, tenant="u")

    async def drop_during_a_flush() -> None:
        store.is_away = True
        flushing = asyncio.ensure_future(registry.flush())
        await asyncio.sleep(WRITE_S / 2)
        registry.dropped = frozenset({"t"})
        registry.drop_tenant("t")
        assert not await flushing
        store.is_away = False
        registry.pin(PrefixRecord("t", block(6), "m", "r1", 96, 9600, 0, pin="rules"))
        assert await registry.flush()
        assert {key(5, "u"), key(6)} <= store.data.keys()
        registry.unpin(block(6))
        assert await registry.flush()

    run(drop_during_a_flush())
    assert not [each for each in store.data if each.startswith("hearth:t:prefix:")]
    assert not store.data["hearth:t:prefixes"]


def test_changes_of_records_that_left_memory_are_dropped_with_their_tenant() -> None:
    store = MemoryStore()
    registry = registry_on(store, max_per_tenant=1)
    for number in (1, 2, 3):
        store_run(registry, number)
    registry.drop_tenant("t")
    assert registry.num_pending == 0
    run(registry.flush())
    assert not store.data


def test_dropping_a_tenant_reads_no_records_of_others() -> None:
    registry = registry_on(MemoryStore(), max_per_tenant=20_000, max_pending=10)
    for number in range(20_000):
        store_run(registry, number)
    began_s = time.process_time()
    for number in range(1_000):
        registry.drop_tenant(f"other-{number}")
    assert time.process_time() - began_s < 0.2  # all records each time: 2 s


def test_recovery_does_not_override_newer_events() -> None:
    store = MemoryStore()
    before = registry_on(store)
    store_run(before, 1, "w0")
    run(before.flush())
    after = registry_on(store)
    store_run(after, 1, "w0")
    after.removed("w0", block(1))
    run(after.recover(lambda *_: True))
    run(after.flush())
    assert holders(store, 1) == set()


def test_recovery_skips_unreadable_records() -> None:
    store = MemoryStore()
    store.data["hearth:t:prefixes"] = {b"zz": 1.0, b"aa": 2.0, block(9).hex().encode(): 3.0}
    store.data[key(9)] = {b"model": b"m", b"num_tokens": b"many"}
    registry = registry_on(store)
    store_run(registry, 1)
    run(registry.recover(lambda *_: True))
    assert list(registry._records) == [block(1)]


def test_recovery_waits_for_redis() -> None:
    store = MemoryStore()
    before = registry_on(store)
    store_run(before, 1)
    run(before.flush())
    after = registry_on(store)
    store_run(after, 2)
    store.is_away = True
    run(after.recover(lambda *_: True))
    store.is_away = False
    run(after.recover(lambda *_: True))
    assert sorted(after._records) == [block(1), block(2)]


def pinned(number: int, tenant: str = "t", name: str = "n") -> PrefixRecord:
    return PrefixRecord(tenant, block(number), "m", "r1", 16 * number, 0, 0, pin=name)


def test_pinned_prefix_counts_hits_and_is_not_trimmed() -> None:
    store = MemoryStore()
    registry = registry_on(store, max_per_tenant=2)
    registry.pin(pinned(1))
    for number in (2, 3, 4):
        store_run(registry, number)
    registry.matched("t", [block(1), block(2), block(3)], 3)
    registry.matched("other", [block(1)], 1)
    run(registry.flush())
    run(registry.trim())
    record = store.data[key(1)]
    assert (record[b"pin"], record[b"hits"], record[b"saved_tokens"]) == (b"n", b"1", b"16")
    assert store.data[key(3)][b"hits"] == b"1"
    registry.unpin(block(1))
    run(registry.flush())
    assert store.data[key(1)][b"pin"] == b""


def test_records_behind_many_pinned_ones_are_trimmed() -> None:
    """Pinned records are written once in half a day, so they may be the oldest."""
    num_pinned, bound = MAX_PER_FLUSH, MAX_PER_FLUSH + 3
    store = MemoryStore()
    registry = registry_on(store, max_per_tenant=bound)
    for number in range(num_pinned):
        registry.pin(pinned(number))
    for number in range(num_pinned, num_pinned + 20):
        store_run(registry, number)
    while registry.num_pending:
        run(registry.flush())
    run(registry.trim())
    left = range(num_pinned + 17, num_pinned + 20)
    assert set(store.data) == {
        *(key(number) for number in (*range(num_pinned), *left)),
        "hearth:t:prefixes",
    }


def test_public_prefix_counts_hits_of_all_tenants() -> None:
    store = MemoryStore()
    registry = registry_on(store)
    registry.pin(pinned(1, tenant=""))
    registry.matched("a", [block(1)], 1)
    registry.matched("b", [block(1)], 1)
    run(registry.flush())
    assert store.data[key(1, "")][b"hits"] == b"2"


def test_pinned_record_is_rewritten_before_it_expires() -> None:
    store = MemoryStore()
    registry = registry_on(store)
    registry.pin(pinned(1))
    run(registry.flush())
    num_writes = store.num_writes
    registry.pin(pinned(1))
    run(registry.flush())
    assert store.num_writes == num_writes
    registry._now = lambda: 1_040.0
    registry.pin(pinned(1))
    run(registry.flush())
    assert store.num_writes == num_writes + 1


def test_rejected_batch_is_not_written_again() -> None:
    class RejectingStore(MemoryStore):
        async def write(self, commands: Sequence[Command]) -> None:
            await super().write(commands)
            raise StoreRejected("WRONGTYPE")

    store = RejectingStore()
    registry = registry_on(store)
    store_run(registry, 1)
    registry.matched("t", [block(1)], 1)
    assert run(registry.flush())
    assert run(registry.flush())
    assert store.data[key(1)][b"hits"] == b"1"


def test_record_that_cannot_be_written_fails_alone() -> None:
    store = MemoryStore()
    registry = registry_on(store)
    store_run(registry, 1)
    store_run(registry, 2, tenant=None)  # type: ignore[arg-type]  # has no key
    store_run(registry, 3, tenant="u")
    assert run(registry.flush())
    assert {key(1), key(3, "u")} <= store.data.keys()
    assert not registry.num_pending


def test_record_with_2500_holders_is_written_completely() -> None:
    store = MemoryStore()
    registry = registry_on(store)
    workers = {f"w{number}" for number in range(2_500)}
    for worker in workers:
        store_run(registry, 1, worker)
    assert run(registry.flush())
    assert holders(store, 1) == workers
