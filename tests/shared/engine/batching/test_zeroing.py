"""KV blocks that are neither held nor findable are zeroed before another sequence writes there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.clock import MonotonicClock
from shared.engine.batching.block_pool import BlockPool
from shared.engine.batching.block_tenants import MAX_TENANTS
from shared.engine.batching.sequence import Sequence, SequenceState
from shared.engine.engine import Engine, StepProgress
from shared.engine.executors.load import load_executor
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.loop import EngineLoop
from shared.engine.step import KvRun, StepInputs, StepOutput
from shared.errors import WorkerBusy
from tests.services.decode.test_handoff import cluster
from tests.shared.engine.batching.test_tenant_quota import cached
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.rig import greedy, new_sequence, prompt
from tests.support.world.clock import run
from tests.support.world.workers import BLOCK_SIZE, CopyingExecutor, request_of

NUM_BLOCKS = 12


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


class Bench:
    """An engine with a model; its loop runs on real threads."""

    def __init__(self, executor: LocalExecutor, *, zeroes_freed_blocks: bool) -> None:
        self.executor = executor
        self.engine = Engine(
            num_blocks=executor.num_blocks,
            block_size=16,
            max_context_tokens=executor.max_context_tokens,
            max_batch_tokens=64,
            max_sequences=8,
            zeroes_freed_blocks=zeroes_freed_blocks,
        )
        self.loop = EngineLoop(self.engine, executor, MonotonicClock())
        self.loop.listen(self._record)
        self.changed = asyncio.Event()

    def _record(self, progress: list[StepProgress]) -> None:
        self.changed.set()

    async def complete(self, sequence: Sequence) -> None:
        self.engine.add(sequence)
        self.loop.wake()
        async with asyncio.timeout(30):
            while sequence.state is not SequenceState.FINISHED:
                self.changed.clear()
                await self.changed.wait()

    def filled_blocks(self) -> set[int]:
        """Blocks with a nonzero KV value in any layer."""
        by_block = self.executor.computer.kv_cache.float().abs().amax(dim=(0, 1, 3, 4, 5))
        return set(by_block.nonzero().flatten().tolist())

    def findable_blocks(self) -> set[int]:
        pool = self.engine.pool
        return {pool._block_ids[0][block.block_hash] for block in pool.cached_blocks()}


@asynccontextmanager
async def bench(model_dir: Path, *, zeroes_freed_blocks: bool) -> AsyncIterator[Bench]:
    size = 2 * 2 * 16 * 2 * 12 * 4  # layers, K and V, tokens, heads, head_dim, FP32
    executor = load_executor(model_dir, dtype="float32", kv_cache_bytes=NUM_BLOCKS * size)
    assert executor.num_blocks == NUM_BLOCKS
    made = Bench(executor, zeroes_freed_blocks=zeroes_freed_blocks)
    made.loop.start()
    try:
        yield made
    finally:
        await made.loop.stop()


@pytest.mark.parametrize("zeroes", [True, False])
async def test_only_findable_blocks_are_left_filled(model_dir: Path, zeroes: bool) -> None:
    async with bench(model_dir, zeroes_freed_blocks=zeroes) as it:
        for start in (10, 60, 110, 10, 90):  # more than the pool holds, so blocks are evicted
            await it.complete(new_sequence(prompt(57, start=start), greedy(4)))
        await it.loop.zero_freed_blocks()
        assert it.findable_blocks()
        assert it.findable_blocks() <= it.filled_blocks()
        assert (it.findable_blocks() == it.filled_blocks()) is zeroes


@pytest.mark.parametrize("zeroes", [True, False])
async def test_tenant_with_quota_below_a_block_leaves_no_kv(model_dir: Path, zeroes: bool) -> None:
    async with bench(model_dir, zeroes_freed_blocks=zeroes) as it:
        sequence = new_sequence(prompt(57), greedy(4))
        sequence.kv_quota_tokens = 1
        await it.complete(sequence)
        await it.loop.zero_freed_blocks()
        assert it.findable_blocks() == set()
        assert (it.filled_blocks() == set()) is zeroes


async def test_idle_loop_zeroes_freed_blocks(model_dir: Path) -> None:
    async with bench(model_dir, zeroes_freed_blocks=True) as it:
        zeroed: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        zero_blocks = it.executor.zero_blocks

        async def zero_and_notify(block_ids: list[int]) -> None:
            await zero_blocks(block_ids)
            if not zeroed.done():
                zeroed.set_result(block_ids)

        it.executor.zero_blocks = zero_and_notify  # type: ignore[method-assign]
        sequence = new_sequence(prompt(5), greedy(4))
        await it.complete(sequence)
        block_ids = await asyncio.wait_for(zeroed, 30)
        assert len(block_ids) == 1
        assert it.filled_blocks() == set()


async def test_failed_zeroing_is_retried(model_dir: Path) -> None:
    async with bench(model_dir, zeroes_freed_blocks=True) as it:
        zero_blocks, attempts, done = it.executor.zero_blocks, [], asyncio.Event()

        async def fail_once(block_ids: list[int]) -> None:
            attempts.append(list(block_ids))
            if len(attempts) == 1:
                raise RuntimeError("the device says no")
            await zero_blocks(block_ids)
            done.set()

        it.executor.zero_blocks = fail_once  # type: ignore[method-assign]
        await it.complete(new_sequence(prompt(5), greedy(4)))
        await asyncio.wait_for(done.wait(), 30)
        assert attempts == [attempts[0], attempts[0]]
        assert it.filled_blocks() == set()


async def test_zero_retention_is_zeroed_on_any_worker(model_dir: Path) -> None:
    async with bench(model_dir, zeroes_freed_blocks=False) as it:
        await it.complete(new_sequence(prompt(33), greedy(4), tenant_id="other"))
        quiet = new_sequence(prompt(57), greedy(4), tenant_id="quiet")
        quiet.is_zero_retention = True
        await it.complete(quiet)  # it takes over the last block of the other tenant
        await it.loop.zero_freed_blocks()
        assert it.engine.pool.num_blocks_of("quiet") == 0
        assert it.filled_blocks() == it.findable_blocks() != set()
        it.engine.drop_tenants(frozenset(("other",)))
        await it.loop.zero_freed_blocks()
        assert it.filled_blocks() == it.findable_blocks() == set()


async def test_dropped_tenant_leaves_nothing_in_free_blocks(model_dir: Path) -> None:
    """The parts of blocks that never got a hash, and a block that was computed twice."""
    async with bench(model_dir, zeroes_freed_blocks=False) as it:
        for start, length in ((10, 57), (10, 48), (60, 20)):
            sequence = new_sequence(prompt(length, start=start), greedy(4), tenant_id="acme")
            await it.complete(sequence)
        assert it.filled_blocks() - it.findable_blocks()
        it.engine.drop_tenants(frozenset(("acme",)))
        await it.loop.zero_freed_blocks()
        assert it.filled_blocks() == set()


def test_dropping_a_tenant_clears_what_the_next_holder_has_not_overwritten() -> None:
    pool = BlockPool(2, 4)
    pool.release(pool.allocate(2, tenant_id="acme"))
    (held,) = pool.allocate(1, tenant_id="other")
    assert pool.drop_tenant("acme") == 0
    free = 1 - held
    assert pool.take_freed() == [free]
    pool.release([held])
    assert pool.take_freed() == [held]
    assert (pool.drop_tenant("acme"), pool.take_freed()) == (0, [])


def test_full_block_has_kv_of_its_own_tenant_alone() -> None:
    pool = BlockPool(1, 4)
    pool.release(pool.allocate(1, tenant_id="acme"))
    cached(pool, "other", "p", 0)
    assert (pool.drop_tenant("acme"), pool.take_freed()) == (0, [])
    assert (pool.drop_tenant("other"), pool.take_freed()) == (1, [0])


def test_block_that_was_cleared_for_a_new_holder_has_its_kv() -> None:
    pool = BlockPool(1, 4, notes_freed=True)
    for tenant_id in ("other", "acme"):
        pool.release(pool.allocate(1, tenant_id=tenant_id))
    held = pool.allocate(1, tenant_id="other")  # written after it is cleared
    assert pool.take_freed() == [0]
    assert (pool.drop_tenant("acme"), pool.drop_tenant("other")) == (0, 0)
    pool.release(held)
    assert pool.take_freed() == [0]


def test_block_of_many_tenants_is_cleared_once_it_is_free() -> None:
    pool = BlockPool(1, 4)
    for number in range(MAX_TENANTS):
        pool.release(pool.allocate(1, tenant_id=f"tenant-{number}"))
        assert pool.take_freed() == []
    pool.release(pool.allocate(1, tenant_id="one-more"))
    assert pool.take_freed() == [0]
    assert pool.drop_tenant("tenant-0") == 0
    assert pool.take_freed() == []


def test_pool_forgets_tenants_of_whom_it_has_no_kv() -> None:
    pool = BlockPool(2, 4)
    for number in range(100):
        cached(pool, f"tenant-{number}", "pq", 0)
    pool.allocate(0, tenant_id="nothing")
    assert len(pool._tenants._of_tenant) == 1
    pool.drop_tenant("tenant-99")
    assert len(pool.take_freed()) == 2
    assert not pool._tenants._of_tenant


def test_dropping_a_tenant_does_not_clear_memory_that_was_given_back() -> None:
    pool = BlockPool(4, 4)
    held = pool.allocate(4, tenant_id="acme")
    pool.resize(2)
    pool.release(held)
    pool.drop_tenant("acme")
    assert pool.take_freed() == [0, 1]
    assert pool.take_retired() == [2, 3]


def test_pool_records_freed_blocks_only_if_enabled() -> None:
    pool = BlockPool(8, 4, notes_freed=True)
    cached(pool, "a", "pq", 0)
    assert pool.take_freed() == []
    private = pool.allocate(2)
    pool.release(private)
    pool.release(pool.allocate(1))
    assert pool.take_freed() == sorted(private)
    pool.allocate(8)
    assert len(pool.take_freed()) == 2  # "pq" was evicted
    assert pool.take_freed() == []
    without_notes = BlockPool(8, 4)
    without_notes.release(without_notes.allocate(8))
    assert without_notes.take_freed() == []


class ZeroCheckingExecutor(CopyingExecutor):
    """Checks before each KV write that the slots from there to the end of the blocks are zero."""

    num_checked = 0

    async def run(self, inputs: StepInputs) -> StepOutput:
        copied = {destination for _, destination in inputs.block_copies}
        for row, num_context in enumerate(inputs.context_lens.tolist()):
            num_blocks = -(-num_context // BLOCK_SIZE)
            table = inputs.block_tables[0, row].tolist()[:num_blocks]
            first = num_context - int(inputs.query_lens[row])
            if not copied & set(table):
                self._check_zeros(table, first)
        return await super().run(inputs)

    async def write_kv(self, run: KvRun, payload: memoryview) -> None:
        self._check_zeros(list(run.block_table), run.first_token)
        await super().write_kv(run, payload)

    def _check_zeros(self, table: list[int], first_token: int) -> None:
        slots = self._slots(table, first_token, len(table) * BLOCK_SIZE - first_token)
        assert not self._kv[slots].any(), "the block has KV of another sequence"
        type(self).num_checked += 1


@pytest.mark.parametrize("zeroes", [True, False])
@pytest.mark.parametrize("copy_s", [0.0, pytest.param(0.003, marks=pytest.mark.long), 0.03])
def test_blocks_are_zeroed_before_they_are_written(copy_s: float, zeroes: bool) -> None:
    """Two tenants alternate in few blocks, with local prefill, pushed KV and aborts."""

    async def main() -> None:
        options = {"num_blocks": 24, "copy_s": copy_s, "zeroes_freed_blocks": zeroes}
        async with cluster(**options, executor_type=ZeroCheckingExecutor) as it:
            placed = []
            for number in range(24):
                tenant_id = f"tenant-{number % 2}"
                tokens = list(range(100 + number, 100 + number + 40 + 9 * (number % 5)))
                request = request_of(tokens, tenant_id=tenant_id, max_tokens=9)
                candidates = ("prefill-1",) if number % 3 else ()
                try:
                    placed.append(await it.peer.place("decode-1", request, candidates))
                except WorkerBusy:  # the pool is small on purpose
                    continue
                await asyncio.sleep(0.004 * (number % 4))
                if number % 7 == 3:
                    await it.peer.abort("decode-1", placed.pop())
            for placement_id in placed:
                received = await it.peer.finished(placement_id)
                assert received.finish.reason == "length"
            await it.settled()

    ZeroCheckingExecutor.num_checked = 0
    if zeroes:
        run(main())
        assert ZeroCheckingExecutor.num_checked > 100
    else:
        with pytest.raises((AssertionError, TimeoutError)):
            run(main())


def test_zeroing_changes_no_token() -> None:
    def outputs(zeroes: bool) -> list[list[int]]:
        async def main() -> list[list[int]]:
            found = []
            async with cluster(num_blocks=24, copy_s=0.003, zeroes_freed_blocks=zeroes) as it:
                for number in range(8):
                    tokens = list(range(100 + number, 190 + number))
                    received = await it.run(request_of(tokens, tenant_id=f"t-{number % 2}"))
                    found.append(received.output)
                await it.settled()
            return found

        return run(main())

    assert outputs(True) == outputs(False)
