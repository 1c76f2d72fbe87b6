"""Steps that raise: which rows fail, and when the device is lost. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from itertools import count
from math import ceil, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.batching.sequence import Sequence, SequenceState
from shared.engine.engine import Engine, StepProgress
from shared.engine.executors.timing_executor import StepCost, TimingExecutor
from shared.engine.failed_steps import MAX_IN_A_ROW
from shared.engine.loop import IDLE_TICK_S, EngineLoop
from shared.engine.step import StepInputs, StepOutput
from shared.errors import DeviceFailed, HearthError, StepFailed
from tests.support.engine.rig import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    greedy,
    new_sequence,
    prompt,
    seeded,
    solo,
)
from tests.support.world.clock import VirtualClock, run

STEP_S = 0.01
POISON = 999
NUM_BLOCKS = 512


class FailingExecutor(TimingExecutor):
    """Raises in steps with a poisonous token, in every step if sick, and in the check if lost."""

    def __init__(self, poison: Collection[int] = (POISON,)) -> None:
        cost = StepCost(base_s=STEP_S, per_token_s=0.0, per_context_token_s=0.0)
        super().__init__(
            VirtualClock(),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
            cost=cost,
        )
        self.poison = poison
        self.is_sick = False
        self.is_lost = False
        self.num_runs = 0
        self.num_passing_errors = 0  # raised by the next steps, which would otherwise succeed

    async def run(self, inputs: StepInputs) -> StepOutput:
        self.num_runs += 1
        output = await super().run(inputs)  # raises late: KV is written before
        self.num_passing_errors -= 1
        has_poison = not set(self.poison).isdisjoint(inputs.input_ids.tolist())
        if has_poison or self.is_sick or self.num_passing_errors >= 0:
            raise RuntimeError("the device says no")
        return output

    async def check(self) -> None:
        await super().check()
        if self.is_lost:
            raise RuntimeError("the device says nothing")

    async def zero_blocks(self, block_ids: list[int]) -> None:
        if self.is_lost:
            raise RuntimeError("the device says nothing")
        await super().zero_blocks(block_ids)


class Worker:
    def __init__(self, executor: FailingExecutor, *, zeroes_freed_blocks: bool = False) -> None:
        self.executor = executor
        self.engine = Engine(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_context_tokens=executor.max_context_tokens,
            max_batch_tokens=2048,
            max_sequences=64,
            zeroes_freed_blocks=zeroes_freed_blocks,
        )
        self.loop = EngineLoop(self.engine, executor, VirtualClock())
        self.loop.listen(self._record)
        self.loop.on_device_lost(self._record_loss)
        self.tokens: dict[bytes, list[int]] = {}
        self.errors: dict[bytes, HearthError] = {}
        self.num_losses = 0

    def _record(self, progress: list[StepProgress]) -> None:
        for each in progress:
            self.tokens.setdefault(each.sequence.sequence_id, []).extend(each.token_ids)
            if each.error is not None:
                assert each.finish_reason == "failed"
                self.errors[each.sequence.sequence_id] = each.error

    def _record_loss(self) -> None:
        self.num_losses += 1

    def add(self, sequence: Sequence) -> Sequence:
        self.engine.add(sequence)
        self.loop.wake()
        return sequence

    async def settled(self) -> None:
        async with asyncio.timeout(100):
            while not self.engine.is_idle:
                await asyncio.sleep(STEP_S)
        self.engine.pool.check()
        assert self.engine.pool.num_free_blocks == NUM_BLOCKS

    def output(self, sequence: Sequence) -> list[int]:
        return self.tokens[sequence.sequence_id]

    def error(self, sequence: Sequence) -> HearthError:
        return self.errors[sequence.sequence_id]


@asynccontextmanager
async def working(executor: FailingExecutor) -> AsyncIterator[Worker]:
    worker = Worker(executor)
    worker.loop.start()
    try:
        yield worker
    finally:
        await worker.loop.stop()


@settings(max_examples=25, deadline=None)
@given(
    num_rows=st.integers(1, 64),
    bad=st.sets(st.integers(0, 63), max_size=3),
    bad_at=st.integers(0, 4),
)
def test_good_rows_are_bit_equal_beside_bad_rows(num_rows: int, bad: set[int], bad_at: int) -> None:
    """`bad_at`: the output position from which a bad row raises; 0: with its prompt."""
    bad = {each for each in bad if each < num_rows}
    prompts = [prompt(3 + n % 9, start=12 * n) for n in range(num_rows)]
    outputs = [solo(tuple(each), seeded(5)) for each in prompts]
    poison = {prompts[n][0] if bad_at == 0 else outputs[n][bad_at - 1] for n in bad}

    async def scenario() -> None:
        async with working(FailingExecutor(poison)) as worker:
            sequences = [worker.add(new_sequence(each, seeded(5))) for each in prompts]
            await worker.settled()
            for token_ids, output, sequence in zip(prompts, outputs, sequences, strict=True):
                computed = until_poison([*token_ids, *output], poison)[len(token_ids) :]
                assert worker.output(sequence) == computed
                is_failed = computed != output or (output[-1] in poison and len(output) < 5)
                assert (sequence.sequence_id in worker.errors) == is_failed

    run(scenario())


def until_poison(token_ids: list[int], poison: set[int]) -> list[int]:
    """The tokens known when a step with the first poisonous one raises."""
    first = next((n for n, each in enumerate(token_ids) if each in poison), len(token_ids))
    return token_ids[: first + 1]


@pytest.mark.parametrize("num_rows", [2, 3, 8, 33, 64])
def test_one_bad_row_takes_few_steps(num_rows: int) -> None:
    async def scenario() -> None:
        async with working(FailingExecutor()) as worker:
            for n in range(num_rows - 1):
                worker.add(new_sequence(prompt(3, start=10 * n), greedy(1)))
            bad = worker.add(new_sequence([POISON], greedy(1)))
            await worker.settled()
            assert worker.executor.num_runs <= 1 + 2 * ceil(log2(num_rows))
            assert isinstance(worker.error(bad), StepFailed)
            assert len(worker.errors) == 1
            load = worker.loop.load()
            assert (load.num_failed_steps, load.num_busy_steps, load.busy_s) == (1, 0, 0.0)
            assert load.step >= worker.executor.num_runs  # each part is progress

    run(scenario())


def test_prefill_and_choices_beside_a_bad_row_continue() -> None:
    async def scenario() -> None:
        async with working(FailingExecutor()) as worker:
            parent = worker.add(new_sequence(prompt(6), None))
            while parent.state is not SequenceState.HELD:
                await asyncio.sleep(STEP_S)
            choices = [
                new_sequence([*prompt(6), 300 + n], seeded(5), choice_index=n) for n in range(3)
            ]
            for each in choices:
                worker.engine.accept(each)
            worker.engine.fork(parent, choices)  # two rows copy a block that the third one writes
            bad = worker.add(new_sequence([POISON, 5], greedy()))
            await worker.settled()
            for n, each in enumerate(choices):
                alone = solo((*prompt(6), 300 + n), seeded(5), choice_index=n)
                assert worker.output(each) == alone
            assert isinstance(worker.error(bad), StepFailed)

    run(scenario())


def test_failed_prefill_is_held_until_released() -> None:
    async def scenario() -> None:
        async with working(FailingExecutor()) as worker:
            prefill = worker.add(new_sequence([POISON, 2, 3], None))
            while prefill.sequence_id not in worker.errors:
                await asyncio.sleep(STEP_S)
            assert prefill.state is SequenceState.HELD
            worker.engine.release(prefill)
            await worker.settled()

    run(scenario())


def test_passing_error_costs_no_row() -> None:
    async def scenario() -> None:
        for num_rows in (1, 4):
            async with working(FailingExecutor()) as worker:
                worker.executor.num_passing_errors = 1
                rows = [new_sequence(prompt(5, start=50 * n), greedy()) for n in range(num_rows)]
                for each in rows:
                    worker.add(each)
                await worker.settled()
                assert not worker.errors
                for n, each in enumerate(rows):
                    assert worker.output(each) == solo(tuple(prompt(5, start=50 * n)), greedy())

    run(scenario())


def test_rows_are_not_blamed_for_the_device() -> None:
    """A request for which the device is to blame may be tried on any number of workers."""

    async def scenario() -> None:
        async with working(FailingExecutor()) as worker:
            worker.executor.is_sick = True
            rows = [worker.add(new_sequence(prompt(5, start=50 * n), greedy())) for n in range(4)]
            await worker.settled()
            assert all(isinstance(worker.error(each), DeviceFailed) for each in rows)

    run(scenario())


def test_choices_of_one_request_do_not_blame_the_device() -> None:
    async def scenario() -> None:
        async with working(FailingExecutor()) as worker:
            ids = count()
            rows = [new_sequence([POISON, n], greedy(), choice_index=n) for n in range(4)]
            for each in rows:
                each.sequence_id = b"p" * 16 + bytes([next(ids)])
                worker.add(each)
            await worker.settled()
            assert all(isinstance(worker.error(each), StepFailed) for each in rows)

    run(scenario())


def test_device_that_fails_its_check_is_lost_at_once() -> None:
    async def scenario() -> None:
        async with working(FailingExecutor()) as worker:
            worker.executor.is_sick = worker.executor.is_lost = True
            only = worker.add(new_sequence(prompt(5), greedy()))
            await asyncio.sleep(10 * STEP_S)
            assert isinstance(worker.error(only), DeviceFailed)
            assert (worker.num_losses, worker.executor.num_runs) == (1, 1)
            worker.add(new_sequence(prompt(5), greedy()))
            await asyncio.sleep(10 * IDLE_TICK_S)
            assert (worker.num_losses, worker.executor.num_runs) == (1, 1)  # computes no more

    run(scenario())


def test_results_of_a_device_that_is_given_up_are_not_used() -> None:
    async def scenario() -> None:
        async with working(FailingExecutor()) as worker:
            only = worker.add(new_sequence(prompt(5), greedy()))
            await asyncio.sleep(1.5 * STEP_S)  # the second step is in flight
            assert len(worker.output(only)) == 1
            worker.loop.fence("Xid 79")
            worker.loop.fence("Xid 79")
            await asyncio.sleep(10 * IDLE_TICK_S)
            assert (worker.num_losses, worker.executor.num_runs) == (1, 2)
            assert len(worker.output(only)) == 1

    run(scenario())


def failures(
    tenants: Iterable[str], *, same_placement: bool = False, request_id: str = ""
) -> list[int]:
    """The number of losses after each failed step, of the requests of these tenants in turn."""
    losses = []

    async def scenario() -> None:
        async with working(FailingExecutor()) as worker:
            for tenant_id in tenants:
                bad = new_sequence([POISON], greedy(), tenant_id=tenant_id)
                bad.sequence_id = b"p" * 16 if same_placement else bad.sequence_id
                bad.request_id = request_id
                worker.add(bad)
                await worker.settled()
                losses.append(worker.num_losses)

    run(scenario())
    return losses


def test_device_is_lost_after_three_failed_steps_in_a_row() -> None:
    assert failures("a" * MAX_IN_A_ROW) == [0, 0, 1]
    assert failures("aab") == [0, 0, 1]


def test_one_request_does_not_cost_a_device() -> None:
    """Each try of a request is another placement; a pinned prefix is computed again and again."""
    no_loss = [0] * 2 * MAX_IN_A_ROW
    assert failures("a" * 2 * MAX_IN_A_ROW, request_id="r1") == no_loss
    assert failures("a" * 2 * MAX_IN_A_ROW, same_placement=True) == no_loss


def test_one_tenant_does_not_cost_others_a_device() -> None:
    async def scenario() -> None:
        async with working(FailingExecutor()) as worker:
            worker.add(new_sequence(prompt(5), greedy(), tenant_id="other"))
            await worker.settled()
            for _ in range(2 * MAX_IN_A_ROW):
                worker.add(new_sequence([POISON], greedy(), tenant_id="poisoner"))
                await worker.settled()
            assert worker.num_losses == 0
            worker.add(new_sequence([POISON], greedy(), tenant_id="other"))
            await worker.settled()
            assert worker.num_losses == 1

    run(scenario())


def test_success_ends_a_row_of_failed_steps() -> None:
    async def scenario() -> None:
        async with working(FailingExecutor()) as worker:
            for _ in range(2 * MAX_IN_A_ROW):
                worker.add(new_sequence([POISON], greedy()))
                await worker.settled()
                worker.add(new_sequence(prompt(5), greedy()))
                await worker.settled()
            assert worker.num_losses == 0
            assert worker.loop.load().num_failed_steps == 2 * MAX_IN_A_ROW

    run(scenario())


def test_device_that_cannot_zero_blocks_is_lost() -> None:
    async def scenario() -> None:
        worker = Worker(FailingExecutor(), zeroes_freed_blocks=True)
        worker.loop.start()
        worker.add(new_sequence(prompt(5), greedy(1)))
        await asyncio.sleep(STEP_S / 2)
        worker.executor.is_lost = True
        await asyncio.sleep(10 * IDLE_TICK_S)
        assert (worker.num_losses, worker.loop.load().num_failed_zeroings) == (1, 1)
        await worker.loop.stop()

    run(scenario())
