"""The block pool while its number of blocks changes, against the small model of the pool."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from shared.engine.batching.block_pool import BlockPool
from shared.messages import BlocksCleared
from tests.shared.engine.batching.test_block_pool import (
    PoolMachine,
    cached,
    chain,
    commit,
    digest,
    match,
    removed,
)

MOST_BLOCKS = 11


class ResizedPoolMachine(PoolMachine):
    """Blocks are given back when they have retired, and until they are added again."""

    def __init__(self) -> None:
        super().__init__()
        self.given_back: set[int] = set()

    @rule(num_blocks=st.integers(0, MOST_BLOCKS))
    def resize(self, num_blocks: int) -> None:
        self.pool.resize(num_blocks)
        model = self.model
        model.path_of = {each: path for each, path in model.path_of.items() if each < num_blocks}
        model.lru = [each for each in model.lru if each < num_blocks]
        self.given_back = {each for each in self.given_back if each >= num_blocks}

    @rule()
    def give_back(self) -> None:
        retired = self.pool.take_retired()
        assert not set(retired) & set(self.model.refs)
        assert all(block_id >= self.pool.num_blocks for block_id in retired)
        self.given_back.update(retired)

    def holds_back(self) -> None:
        self.give_back()
        above = range(self.pool.num_blocks, MOST_BLOCKS)
        retiring = {each for each in self.model.refs if each >= self.pool.num_blocks}
        known = {each for each in above if each < len(self.pool.ref_counts)}
        assert self.given_back == known - retiring, "a block is lost"

    def teardown(self) -> None:
        self.holds_back()
        super().teardown()


TestResizedPoolMachine = ResizedPoolMachine.TestCase
TestResizedPoolMachine.settings = settings(max_examples=50, stateful_step_count=40)


def test_smaller_pool_evicts_the_cached_blocks_above() -> None:
    pool = BlockPool(6, 4)
    cached(pool, "abcd")
    pool.take_events()
    pool.resize(2)
    assert removed(pool) == [digest("abc"), digest("abcd")]
    assert match(pool, chain("abcd")) == [0, 1]
    assert (pool.num_free_blocks, pool.take_retired()) == (2, [2, 3, 4, 5])
    pool.check()


def test_held_block_above_is_not_findable_and_retires_when_it_is_released() -> None:
    pool = BlockPool(4, 4)
    block_ids = pool.allocate(4)
    commit(pool, block_ids, "abcd")
    pool.take_events()
    pool.resize(2)
    assert removed(pool) == [digest("abc"), digest("abcd")]
    assert (pool.num_free_blocks, pool.num_retiring_blocks, pool.take_retired()) == (0, 2, [])
    commit(pool, block_ids, "abcd")
    assert match(pool, chain("abcd")) == block_ids[:2]
    pool.release(block_ids[3:])
    assert (pool.has_retired, pool.take_retired(), pool.has_retired) == (True, [3], False)
    pool.release(block_ids[:3])
    assert (pool.num_free_blocks, pool.take_retired()) == (2, [2, 3])
    pool.check()


def test_held_block_that_is_added_again_is_an_ordinary_one() -> None:
    pool = BlockPool(3, 4)
    held = pool.allocate(3)
    pool.resize(1)
    pool.resize(3)
    assert (pool.num_retiring_blocks, pool.num_free_blocks) == (0, 0)
    pool.release(held)
    assert (pool.num_free_blocks, pool.take_retired()) == (3, [])
    pool.check()


def test_added_blocks_are_allocated_last() -> None:
    pool = BlockPool(2, 4)
    pool.resize(4)
    assert pool.allocate(4) == [0, 1, 2, 3]


def test_pool_without_blocks_has_cleared_its_cache() -> None:
    pool = BlockPool(4, 4)
    cached(pool, "abc")
    pool.resize(0)
    assert pool.take_events() == [BlocksCleared()]
    pool.resize(0)
    assert pool.take_events() == []
    assert pool.take_retired() == [0, 1, 2, 3]
    pool.check()


def test_retired_blocks_are_zeroed_where_freed_ones_are() -> None:
    pool = BlockPool(3, 4, notes_freed=True)
    held = pool.allocate(2)
    commit(pool, held[1:], "a")
    pool.resize(1)
    assert pool.take_freed() == []
    pool.release(held)
    assert pool.take_freed() == [0, 1]
