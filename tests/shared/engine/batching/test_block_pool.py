"""The block pool: exact eviction order, events, and random operations against a small model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.engine.batching.block_pool import BlockPool
from shared.engine.batching.cached_block import CachedBlock, runs_of
from shared.messages import BlocksCleared, BlocksRemoved, BlocksStored
from shared.packing import unpack_hashes

ROOT = b"\0" * 16


def match(pool: BlockPool, block_hashes: Sequence[bytes]) -> list[int]:
    (block_ids,) = pool.match(block_hashes).block_ids
    return block_ids


def digest(path: str) -> bytes:
    """Hash of a chain of blocks, given as a path in a prefix tree: "abb" is a child of "ab"."""
    return blake2b(path.encode(), digest_size=16).digest() if path else ROOT


def chain(path: str) -> list[bytes]:
    return [digest(path[: end + 1]) for end in range(len(path))]


def commit(pool: BlockPool, block_ids: list[int], path: str, first: int = 0) -> None:
    pool.commit(
        0,
        block_ids,
        chain(path)[first:],
        tenant_id="tenant-a",
        parent_hash=digest(path[:first]),
        first_block_index=first,
    )


def cached(pool: BlockPool, path: str) -> list[int]:
    """Allocates, commits and releases a chain."""
    block_ids = pool.allocate(len(path))
    commit(pool, block_ids, path)
    pool.release(block_ids)
    return block_ids


def removed(pool: BlockPool) -> list[bytes]:
    events = [event for event in pool.take_events() if isinstance(event, BlocksRemoved)]
    return [each for event in events for each in unpack_hashes(event.block_hashes)]


def test_lru_chain_is_evicted_tail_first() -> None:
    pool = BlockPool(6, 4)
    cached(pool, "abc")
    cached(pool, "xyz")
    pool.take_events()
    pool.allocate(6)
    assert removed(pool) == [digest(p) for p in ["abc", "ab", "a", "xyz", "xy", "x"]]


def test_cache_hit_moves_only_its_blocks_to_lru_end() -> None:
    pool = BlockPool(6, 4)
    cached(pool, "abc")
    cached(pool, "xyz")
    hit = match(pool, chain("ab"))
    pool.hold(hit)
    pool.release(hit)
    pool.take_events()
    pool.allocate(6)
    assert removed(pool) == [digest(p) for p in ["abc", "xyz", "xy", "x", "ab", "a"]]


def test_empty_blocks_are_allocated_before_cached_ones() -> None:
    pool = BlockPool(4, 4)
    cached(pool, "ab")
    block_ids = pool.allocate(2)
    assert removed(pool) == []
    pool.release(block_ids)
    pool.allocate(3)
    assert removed(pool) == [digest("ab")]


def test_held_block_is_never_evicted() -> None:
    pool = BlockPool(3, 4)
    cached(pool, "abc")
    pool.hold(match(pool, chain("a")))
    assert pool.num_free_blocks == 2
    pool.allocate(2)
    with pytest.raises(ValueError, match="1 blocks requested, 0 free"):
        pool.allocate(1)
    assert match(pool, chain("abc")) == match(pool, chain("a")) != []


def test_match_ends_at_the_first_missing_block() -> None:
    pool = BlockPool(4, 4)
    block_ids = cached(pool, "abc")
    assert match(pool, chain("abd")) == block_ids[:2]
    assert match(pool, chain("bbc")) == []
    pool.allocate(2)  # one empty, then the tail of "abc"
    assert match(pool, chain("abc")) == block_ids[:2]


def test_child_without_its_parent_does_not_match() -> None:
    pool = BlockPool(4, 4)
    block_ids = pool.allocate(3)
    commit(pool, block_ids[2:], "abc", 2)
    assert match(pool, chain("abc")) == []
    commit(pool, block_ids[:1], "a")
    assert match(pool, chain("abc")) == block_ids[:1]


def test_num_evictable_in_counts_unreferenced_blocks() -> None:
    pool = BlockPool(4, 4)
    block_ids = cached(pool, "ab")
    assert pool.num_evictable_in(block_ids) == 2
    pool.hold(block_ids[:1])
    assert pool.num_evictable_in(block_ids) == 1
    assert pool.num_cached_blocks == 1


def test_known_hash_keeps_its_block() -> None:
    pool = BlockPool(6, 4)
    first, second = pool.allocate(2), pool.allocate(3)
    commit(pool, first, "ab")
    pool.take_events()
    commit(pool, second, "abc")
    assert match(pool, chain("abc")) == [*first, second[2]]
    assert pool.take_events() == [
        BlocksStored(
            tenant_id="tenant-a",
            parent_hash=digest("ab"),
            first_block_index=2,
            block_hashes=digest("abc"),
        )
    ]
    pool.release(second)
    assert pool.num_cached_blocks == 1  # the two duplicates are empty again
    pool.check()


def test_events_are_runs_in_order_of_occurrence() -> None:
    pool = BlockPool(3, 4)
    cached(pool, "ab")
    cached(pool, "x")
    pool.release(pool.allocate(2))
    assert pool.take_events() == [
        BlocksStored(
            tenant_id="tenant-a",
            parent_hash=ROOT,
            first_block_index=0,
            block_hashes=digest("a") + digest("ab"),
        ),
        BlocksStored(
            tenant_id="tenant-a",
            parent_hash=ROOT,
            first_block_index=0,
            block_hashes=digest("x"),
        ),
        BlocksRemoved(block_hashes=digest("ab") + digest("a")),
    ]
    assert pool.take_events() == []


def test_runs_split_where_the_parent_differs() -> None:
    blocks = [
        CachedBlock("tenant-a", digest(path[:-1]), len(path) - 1, digest(path))
        for path in ("a", "ab", "b", "bc", "abc")
    ]
    runs = [event for event in runs_of(blocks) if isinstance(event, BlocksStored)]
    assert [unpack_hashes(run.block_hashes) for run in runs] == [
        chain("ab"),
        chain("bc"),
        [digest("abc")],
    ]
    assert [run.first_block_index for run in runs] == [0, 0, 2]


def test_release_of_unreferenced_block_raises() -> None:
    pool = BlockPool(2, 4)
    block_ids = pool.allocate(1)
    pool.release(block_ids)
    with pytest.raises(ValueError, match="released more often than held"):
        pool.release(block_ids)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_rounds_up(num_tokens: int, num_blocks: int) -> None:
    assert BlockPool(8, 4).blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize("damage", ["lost", "twice", "nameless"])
def test_check_detects_an_inconsistent_pool(damage: str) -> None:
    pool = BlockPool(4, 4)
    cached(pool, "ab")
    match damage:
        case "lost":
            pool._empty.pop()
        case "twice":
            pool._empty.append(pool._empty[0])
        case "nameless":
            pool._known[next(iter(pool._evictable))] = None
    with pytest.raises(AssertionError):
        pool.check()


def test_pinned_blocks_are_evicted_last() -> None:
    pool = BlockPool(6, 4)
    cached(pool, "abc")
    cached(pool, "xyz")
    pool.pin(chain("ab"))
    pool.take_events()
    pool.allocate(6)
    assert removed(pool) == [digest(p) for p in ["abc", "xyz", "xy", "x", "ab", "a"]]


def test_block_pinned_twice_stays_pinned_after_one_unpin() -> None:
    pool = BlockPool(4, 4)
    cached(pool, "ab")
    cached(pool, "xy")
    pool.pin(chain("ab"))
    pool.pin(chain("a"))
    assert (pool.num_pinned_blocks, pool.num_pinned_with(chain("abc"))) == (2, 3)
    pool.unpin(chain("ab"))
    pool.take_events()
    pool.allocate(4)
    assert removed(pool) == [digest(p) for p in ["xy", "x", "ab", "a"]]


def test_block_can_be_pinned_before_it_is_cached() -> None:
    pool = BlockPool(4, 4)
    pool.pin(chain("ab"))
    cached(pool, "ab")
    cached(pool, "xy")
    pool.take_events()
    pool.allocate(3)
    assert removed(pool) == [digest(p) for p in ["xy", "x", "ab"]]


class Model:
    """A simple model of the pool: references, known hashes, pins and LRU order."""

    def __init__(self) -> None:
        self.refs: dict[int, int] = {}
        self.path_of: dict[int, str] = {}
        self.lru: list[int] = []
        self.pins: Counter[str] = Counter()

    def find(self, path: str) -> list[int]:
        by_path = {known: block_id for block_id, known in self.path_of.items()}
        found = []
        for end in range(1, len(path) + 1):
            if path[:end] not in by_path:
                break
            found.append(by_path[path[:end]])
        return found

    def hold(self, block_id: int) -> None:
        self.refs[block_id] = self.refs.get(block_id, 0) + 1
        self.lru = [each for each in self.lru if each != block_id]

    def evict(self, count: int) -> list[str]:
        victims = sorted(self.lru, key=lambda block_id: self.path_of[block_id] in self.pins)[:count]
        self.lru = [block_id for block_id in self.lru if block_id not in victims]
        return [self.path_of.pop(block_id) for block_id in victims]

    def pin(self, path: str, step: int) -> None:
        """A block whose pinned state changes becomes most recently used, a chain's tail first."""
        for end in range(len(path), 0, -1):
            before = self.pins[path[:end]] > 0
            self.pins[path[:end]] += step
            block_ids = [each for each in self.lru if self.path_of[each] == path[:end]]
            if before != (self.pins[path[:end]] > 0) and block_ids:
                self.lru.remove(block_ids[0])
                self.lru.append(block_ids[0])
        self.pins = +self.pins

    def release(self, block_id: int) -> None:
        self.refs[block_id] -= 1
        if self.refs[block_id] == 0:
            del self.refs[block_id]
            if block_id in self.path_of:
                self.lru.append(block_id)


class PoolMachine(RuleBasedStateMachine):
    """Holders use a chain as a sequence does: match, hold, allocate, commit, release."""

    NUM_BLOCKS = 7

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS, 4)
        self.model = Model()
        self.holders: list[tuple[str, list[int]]] = []
        self.replayed: dict[tuple[int, bytes], tuple[str, bytes, int]] = {}
        self.pinned: list[str] = []

    @rule(path=st.text("ab", min_size=1, max_size=4))
    def pin(self, path: str) -> None:
        self.pool.pin(chain(path))
        self.model.pin(path, 1)
        self.pinned.append(path)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        path = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.pool.unpin(chain(path))
        self.model.pin(path, -1)

    @rule(path=st.text("ab", min_size=1, max_size=5))
    def admit(self, path: str) -> None:
        hit = match(self.pool, chain(path))
        assert hit == self.model.find(path)
        num_new = len(path) - len(hit)
        if num_new + self.pool.num_evictable_in(hit) > self.pool.num_free_blocks:
            return
        self.pool.hold(hit)
        for block_id in hit:
            self.model.hold(block_id)
        num_empty = self.pool.num_free_blocks - len(self.model.lru)
        evicted = self.model.evict(max(0, num_new - num_empty))
        self.replay()
        new = self.pool.allocate(num_new)
        assert removed_by(self.replay()) == [digest(each) for each in evicted]
        assert not set(new) & (set(self.model.refs) | set(self.model.lru))
        for block_id in new:
            self.model.hold(block_id)
        self.holders.append((path, hit + new))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        path, block_ids = data.draw(st.sampled_from(self.holders))
        end = data.draw(st.integers(1, len(path)))
        first = data.draw(st.integers(0, end - 1))
        commit(self.pool, block_ids[first:end], path[:end], first)
        known = set(self.model.path_of.values())
        for index in range(first, end):
            is_new = path[: index + 1] not in known and block_ids[index] not in self.model.path_of
            if is_new and block_ids[index] < self.pool.num_blocks:
                self.model.path_of[block_ids[index]] = path[: index + 1]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        _, block_ids = self.holders.pop(index)
        self.pool.release(block_ids)
        for block_id in reversed(block_ids):
            self.model.release(block_id)

    def replay(self) -> list[object]:
        events = self.pool.take_events()
        for event in events:
            replay(event, self.replayed)
        return list(events)

    @invariant()
    def holds(self) -> None:
        self.pool.check()
        self.replay()
        assert self.replayed == listing(self.pool)
        assert set(self.replayed) == {(0, digest(path)) for path in self.model.path_of.values()}
        assert self.pool.num_cached_blocks == len(self.model.lru)
        assert self.pool.num_pinned_blocks == len(self.model.pins)
        num_held = sum(block_id < self.pool.num_blocks for block_id in self.model.refs)
        assert self.pool.num_free_blocks == self.pool.num_blocks - num_held
        assert self.pool.num_retiring_blocks == len(self.model.refs) - num_held

    def teardown(self) -> None:
        for _, block_ids in self.holders:
            self.pool.release(block_ids)
        self.pool.check()
        assert self.pool.num_free_blocks == self.pool.num_blocks


def removed_by(events: list[object]) -> list[bytes]:
    runs = [event.block_hashes for event in events if isinstance(event, BlocksRemoved)]
    return [each for run in runs for each in unpack_hashes(run)]


def replay(event: object, known: dict[tuple[int, bytes], tuple[str, bytes, int]]) -> None:
    """Applies an event to an index of group and hash to (tenant, parent, position)."""
    match event:
        case BlocksStored():
            parent = event.parent_hash
            for index, each in enumerate(unpack_hashes(event.block_hashes)):
                assert (event.group, each) not in known, "stored twice"
                known[event.group, each] = (
                    event.tenant_id,
                    parent,
                    event.first_block_index + index,
                )
                parent = each
        case BlocksRemoved():
            for each in unpack_hashes(event.block_hashes):
                del known[event.group, each]
        case BlocksCleared():
            known.clear()


def listing(pool: BlockPool) -> dict[tuple[int, bytes], tuple[str, bytes, int]]:
    return {
        (each.group, each.block_hash): (each.tenant_id, each.parent_hash, each.block_index)
        for each in pool.cached_blocks()
    }


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
