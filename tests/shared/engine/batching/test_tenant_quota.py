"""A tenant's KV quota: which blocks are evicted, in which order; tokens do not change."""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import blake2b

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.engine.batching.block_pool import BlockPool
from tests.shared.engine.batching.test_block_pool import removed_by
from tests.support.engine.rig import BLOCK_SIZE, Rig, greedy, new_sequence, prompt, solo

NO_QUOTA = 0


def match(pool: BlockPool, block_hashes: Sequence[bytes]) -> list[int]:
    (block_ids,) = pool.match(block_hashes).block_ids
    return block_ids


def digest(tenant_id: str, path: str) -> bytes:
    return blake2b(f"{tenant_id}/{path}".encode(), digest_size=16).digest()


def chain(tenant_id: str, path: str) -> list[bytes]:
    return [digest(tenant_id, path[: end + 1]) for end in range(len(path))]


def commit(pool: BlockPool, block_ids: list[int], tenant_id: str, path: str, quota: int) -> None:
    pool.commit(
        0,
        block_ids,
        chain(tenant_id, path),
        tenant_id=tenant_id,
        parent_hash=digest(tenant_id, ""),
        first_block_index=0,
        kv_quota_tokens=quota * pool.block_size,
    )


def cached(pool: BlockPool, tenant_id: str, path: str, quota: int) -> None:
    block_ids = pool.allocate(len(path))
    commit(pool, block_ids, tenant_id, path, quota)
    pool.release(block_ids)


def removed_paths(pool: BlockPool, tenant_id: str, *paths: str) -> list[str]:
    """The paths of the tenant's blocks removed since the last call, in order of removal."""
    name_of = {digest(tenant_id, path): path for path in paths}
    return [name_of[each] for each in removed_by(list(pool.take_events()))]


def test_pinned_blocks_do_not_slow_the_eviction_of_others() -> None:
    num_pinned, num_others = 8192, 2048
    pool = BlockPool(num_pinned + num_others, 4)
    pinned = [number.to_bytes(16, "big") for number in range(num_pinned)]
    others = [number.to_bytes(16, "little") for number in range(1, num_others + 1)]
    pool.pin(pinned)
    for hashes in (pinned, others):
        block_ids = pool.allocate(len(hashes))
        pool.commit(0, block_ids, hashes, tenant_id="a", parent_hash=bytes(16), first_block_index=0)
        pool.release(block_ids)
    began_s = time.process_time()
    pool.limit("a", (num_pinned + num_others // 2) * pool.block_size)
    assert time.process_time() - began_s < 0.2  # a look at each pinned block: seconds
    assert len(match(pool, pinned)) == num_pinned
    assert len(match(pool, others)) == num_others // 2


def test_tenant_over_quota_loses_its_oldest_blocks() -> None:
    pool = BlockPool(20, 4)
    cached(pool, "a", "pq", 4)
    cached(pool, "b", "pq", NO_QUOTA)
    cached(pool, "a", "xyz", 4)
    assert removed_paths(pool, "a", "pq", "p") == ["pq"]
    cached(pool, "a", "uvw", 4)
    assert removed_paths(pool, "a", "p", "xyz", "xy") == ["p", "xyz", "xy"]
    assert pool.num_blocks_of("a") == 4
    assert pool.num_blocks_of("b") == 2
    assert pool.num_free_blocks == 20
    pool.check()


def test_chain_longer_than_quota_keeps_its_head() -> None:
    pool = BlockPool(20, 4)
    block_ids = pool.allocate(5)
    commit(pool, block_ids, "a", "vwxyz", 2)
    assert match(pool, chain("a", "vwxyz")) == block_ids  # while it is held
    pool.release(block_ids)
    assert removed_paths(pool, "a", "vwxyz", "vwxy", "vwx") == ["vwxyz", "vwxy", "vwx"]
    assert match(pool, chain("a", "vwxyz")) == block_ids[:2]


def test_held_blocks_are_not_evicted_for_the_quota() -> None:
    pool = BlockPool(20, 4)
    cached(pool, "a", "pq", 4)
    held = match(pool, chain("a", "pq"))
    pool.hold(held)
    others = pool.allocate(4)
    commit(pool, others, "a", "wxyz", 4)
    assert match(pool, chain("a", "pq")) == held
    assert match(pool, chain("a", "wxyz")) == others
    assert pool.num_blocks_of("a") == 6
    pool.release(others)
    assert removed_paths(pool, "a", "wxyz", "wxy") == ["wxyz", "wxy"]


def test_quota_below_one_block_caches_nothing() -> None:
    pool = BlockPool(4, 4)
    block_ids = pool.allocate(1)
    pool.commit(
        0,
        block_ids,
        chain("a", "x"),
        tenant_id="a",
        parent_hash=digest("a", ""),
        first_block_index=0,
        kv_quota_tokens=3,
    )
    pool.release(block_ids)
    assert match(pool, chain("a", "x")) == []


def test_new_quota_applies_at_once_until_the_last_block() -> None:
    pool = BlockPool(20, 4)
    cached(pool, "a", "vwxyz", NO_QUOTA)
    pool.limit("a", 3 * 4)
    assert pool.num_blocks_of("a") == 3
    pool.limit("a", NO_QUOTA)
    cached(pool, "a", "pq", NO_QUOTA)
    assert pool.num_blocks_of("a") == 5
    pool.limit("a", 1)
    pool.limit("b", 1)
    assert pool._shares == {}


def test_tenants_without_blocks_are_forgotten() -> None:
    pool = BlockPool(8, 4)
    for number in range(1000):
        cached(pool, f"tenant-{number}", "xy", 4)
    assert len(pool._shares) == 4
    pool.release(pool.allocate(8))
    assert pool._shares == {}


def test_without_quotas_eviction_is_lru_across_tenants() -> None:
    pool = BlockPool(6, 4)
    cached(pool, "a", "xyz", NO_QUOTA)
    cached(pool, "b", "xyz", NO_QUOTA)
    hit = match(pool, chain("a", "x"))
    pool.hold(hit)
    pool.release(hit)
    pool.take_events()
    pool.allocate(6)
    removed = removed_by(list(pool.take_events()))
    expected = [("a", "xyz"), ("a", "xy"), ("b", "xyz"), ("b", "xy"), ("b", "x"), ("a", "x")]
    assert removed == [digest(*each) for each in expected]


def test_many_removals_are_one_event() -> None:
    pool = BlockPool(60_000, 4)
    block_ids = pool.allocate(60_000)
    pool.commit(
        0,
        block_ids,
        [index.to_bytes(16, "big") for index in range(60_000)],
        tenant_id="a",
        parent_hash=digest("a", ""),
        first_block_index=0,
    )
    pool.release(block_ids)
    pool.take_events()
    pool.limit("a", 1)
    (event,) = pool.take_events()
    assert len(removed_by([event])) == 60_000


@pytest.mark.parametrize("quota", [NO_QUOTA, 1, 4, 12, 40])
def test_tokens_do_not_depend_on_the_quota(quota: int) -> None:
    rig = Rig(num_blocks=12, max_batch_tokens=7)
    requests = []
    for start in (100, 300, 100, 500, 300):
        sequence = new_sequence(prompt(13, start=start), greedy(9))
        sequence.kv_quota_tokens = quota
        requests.append((start, rig.add(sequence)))
    rig.run()
    for start, sequence in requests:
        assert rig.output(sequence) == solo(tuple(prompt(13, start=start)), greedy(9))
    if quota:
        assert rig.engine.pool.num_blocks_of("tenant-a") <= quota // BLOCK_SIZE


def test_fully_cached_request_applies_its_quota() -> None:
    rig = Rig(num_blocks=32)
    rig.complete(new_sequence(prompt(18), greedy(1)))
    assert rig.engine.pool.num_blocks_of("tenant-a") == 4
    again = new_sequence(prompt(18), greedy(1))  # fills no block of its own
    again.kv_quota_tokens = 2 * BLOCK_SIZE
    rig.complete(again)
    assert again.num_cached_tokens == 16
    assert rig.engine.pool.num_blocks_of("tenant-a") == 2


class Model:
    """A simple model of references, known blocks, LRU order and quotas, by linear search."""

    def __init__(self) -> None:
        self.refs: dict[int, int] = {}
        self.known: dict[int, tuple[str, str]] = {}
        self.lru: list[int] = []
        self.quotas: dict[str, int] = {}

    def find(self, tenant_id: str, path: str) -> list[int]:
        by_name = {name: block_id for block_id, name in self.known.items()}
        found = []
        for end in range(1, len(path) + 1):
            block_id = by_name.get((tenant_id, path[:end]))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def hold(self, block_id: int) -> None:
        self.refs[block_id] = self.refs.get(block_id, 0) + 1
        self.lru = [each for each in self.lru if each != block_id]

    def evict(self, block_id: int) -> tuple[str, str]:
        self.lru.remove(block_id)
        name = self.known.pop(block_id)
        if self.num_blocks_of(name[0]) == 0:
            self.quotas.pop(name[0], None)
        return name

    def num_blocks_of(self, tenant_id: str) -> int:
        return sum(owner == tenant_id for owner, _ in self.known.values())

    def limit(self, tenant_id: str, quota: int) -> list[tuple[str, str]]:
        if self.num_blocks_of(tenant_id):
            self.quotas[tenant_id] = quota
        return self.trim(tenant_id)

    def trim(self, tenant_id: str) -> list[tuple[str, str]]:
        evicted = []
        while (quota := self.quotas.get(tenant_id)) and self.num_blocks_of(tenant_id) > quota:
            own = [each for each in self.lru if self.known[each][0] == tenant_id]
            if not own:
                break
            evicted.append(self.evict(own[0]))
        return evicted

    def release(self, block_id: int) -> list[tuple[str, str]]:
        self.refs[block_id] -= 1
        if self.refs[block_id]:
            return []
        del self.refs[block_id]
        if block_id not in self.known:
            return []
        self.lru.append(block_id)
        return self.trim(self.known[block_id][0])


TENANTS = st.sampled_from(["a", "b", "c"])


class QuotaMachine(RuleBasedStateMachine):
    """Tenants with the same prompts. The model predicts the evicted blocks and their order."""

    NUM_BLOCKS = 9

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS, 4)
        self.model = Model()
        self.holders: list[tuple[str, str, list[int]]] = []

    def expect(self, evicted: list[tuple[str, str]]) -> None:
        removed = removed_by(list(self.pool.take_events()))
        assert removed == [digest(*name) for name in evicted]

    @rule(tenant_id=TENANTS, path=st.text("xy", min_size=1, max_size=5))
    def admit(self, tenant_id: str, path: str) -> None:
        hit = match(self.pool, chain(tenant_id, path))
        assert hit == self.model.find(tenant_id, path)
        num_new = len(path) - len(hit)
        if num_new + self.pool.num_evictable_in(hit) > self.pool.num_free_blocks:
            return
        self.pool.hold(hit)
        for block_id in hit:
            self.model.hold(block_id)
        num_empty = self.NUM_BLOCKS - len(self.model.refs) - len(self.model.lru)
        victims = self.model.lru[: max(0, num_new - num_empty)]
        evicted = [self.model.evict(block_id) for block_id in victims]
        new = self.pool.allocate(num_new)
        self.expect(evicted)
        for block_id in new:
            assert block_id not in self.model.refs
            assert block_id not in self.model.known
            self.model.hold(block_id)
        self.holders.append((tenant_id, path, hit + new))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), quota=st.integers(0, 5))
    def commit(self, data: st.DataObject, quota: int) -> None:
        tenant_id, path, block_ids = data.draw(st.sampled_from(self.holders))
        end = data.draw(st.integers(1, len(path)))
        commit(self.pool, block_ids[:end], tenant_id, path[:end], quota)
        known = set(self.model.known.values())
        for index in range(end):
            name = (tenant_id, path[: index + 1])
            if name not in known and block_ids[index] not in self.model.known:
                self.model.known[block_ids[index]] = name
        self.expect(self.model.limit(tenant_id, quota))

    @rule(tenant_id=TENANTS, quota=st.integers(0, 5))
    def limit(self, tenant_id: str, quota: int) -> None:
        self.pool.limit(tenant_id, quota * 4)
        self.expect(self.model.limit(tenant_id, quota))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        _, _, block_ids = self.holders.pop(index)
        self.pool.release(block_ids)
        evicted = []
        for block_id in reversed(block_ids):
            evicted += self.model.release(block_id)
        self.expect(evicted)

    @invariant()
    def holds(self) -> None:
        self.pool.check()
        findable = {block.block_hash for block in self.pool.cached_blocks()}
        assert findable == {digest(*name) for name in self.model.known.values()}
        for tenant_id in ("a", "b", "c"):
            assert self.pool.num_blocks_of(tenant_id) == self.model.num_blocks_of(tenant_id)
        assert self.pool.num_free_blocks == self.NUM_BLOCKS - len(self.model.refs)
        assert self.pool.num_cached_blocks == len(self.model.lru)

    def teardown(self) -> None:
        for _, _, block_ids in self.holders:
            self.pool.release(block_ids)
        self.pool.check()
        assert self.pool.num_free_blocks == self.NUM_BLOCKS


TestQuotaMachine = QuotaMachine.TestCase
TestQuotaMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
