"""The engine loop, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.engine.batching.sequence import Sequence, SequenceState
from shared.engine.engine import Engine, StepProgress
from shared.engine.executors.expert_load import HALF_LIFE_S, LEAST_MEAN, ExpertLoad
from shared.engine.executors.timing_executor import StepCost, TimingExecutor
from shared.engine.loop import COUNT_EXPERTS_S, IDLE_TICK_S, EngineLoop
from shared.engine.step import StepInputs
from shared.messages import SamplingParams
from tests.support.engine.rig import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    greedy,
    new_sequence,
    prompt,
    solo,
)
from tests.support.world.clock import VirtualClock, run

STEP_S = 0.01


class RecordingExecutor(TimingExecutor):
    """Records when each step began."""

    def __init__(self, *, step_s: float = STEP_S) -> None:
        cost = StepCost(base_s=step_s, per_token_s=0.0, per_context_token_s=0.0)
        super().__init__(
            VirtualClock(),
            num_blocks=64,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
            cost=cost,
        )
        self.began_s: list[float] = []
        self.num_done = 0
        self.is_closed = False

    async def run(self, inputs: StepInputs) -> list[int]:
        self.began_s.append(VirtualClock().now())
        sampled = await super().run(inputs)
        self.num_done += 1
        return sampled

    async def close(self) -> None:
        self.is_closed = True


class Bench:
    def __init__(self, executor: RecordingExecutor, *, max_sequences: int = 8) -> None:
        self.executor = executor
        self.engine = Engine(
            num_blocks=executor.num_blocks,
            block_size=BLOCK_SIZE,
            max_context_tokens=executor.max_context_tokens,
            max_batch_tokens=64,
            max_sequences=max_sequences,
        )
        self.loop = EngineLoop(self.engine, executor, VirtualClock())
        self.loop.listen(self._record)
        self.received: list[StepProgress] = []
        self.changed = asyncio.Event()

    def _record(self, progress: list[StepProgress]) -> None:
        self.received += progress
        self.changed.set()

    def add(self, sequence: Sequence) -> Sequence:
        self.engine.add(sequence)
        self.loop.wake()
        return sequence

    async def wait_for_state(self, sequence: Sequence, state: SequenceState) -> None:
        async with asyncio.timeout(100):
            while sequence.state is not state:
                self.changed.clear()
                await self.changed.wait()

    async def wait_until_finished(self, sequence: Sequence) -> StepProgress:
        await self.wait_for_state(sequence, SequenceState.FINISHED)
        return next(p for p in reversed(self.received) if p.sequence is sequence)

    def tokens(self, sequence: Sequence) -> list[int]:
        return [t for each in self.received if each.sequence is sequence for t in each.token_ids]


@asynccontextmanager
async def running(executor: RecordingExecutor, *, max_sequences: int = 8) -> AsyncIterator[Bench]:
    bench = Bench(executor, max_sequences=max_sequences)
    bench.loop.start()
    try:
        yield bench
    finally:
        await bench.loop.stop()


def test_loop_runs_all_added_sequences() -> None:
    async def scenario() -> None:
        async with running(RecordingExecutor()) as bench:
            sequences = [bench.add(new_sequence(prompt(n + 1), greedy())) for n in range(5)]
            for n, sequence in enumerate(sequences):
                assert (await bench.wait_until_finished(sequence)).finish_reason == "length"
                assert bench.tokens(sequence) == solo(tuple(prompt(n + 1)), greedy())
            assert bench.engine.is_idle
            load = bench.loop.load()
            assert sum(load.num_steps_by_tokens) == load.num_busy_steps > 0
            assert load.num_steps_by_tokens[3] == 1  # 15 tokens of prompts and 5 sampled

    run(scenario())


def test_idle_loop_keeps_nothing_of_the_last_sequences() -> None:
    """Their rows hold tokens where penalties need them."""
    params = SamplingParams(seed=0, max_tokens=4, temperature=0.0, presence_penalty=1.0)

    async def main() -> None:
        async with running(RecordingExecutor()) as bench:
            for start in (100, 200):
                bench.add(new_sequence(prompt(5, start=start), params))
            await VirtualClock().sleep(2 * STEP_S)
            assert len(bench.executor._state._special) == 2
            await VirtualClock().sleep(10 * STEP_S)
            assert bench.executor._state._special == {}

    run(main())


def test_step_counter_increases_while_idle() -> None:
    async def scenario() -> None:
        async with running(RecordingExecutor()) as bench:
            await asyncio.sleep(10 * IDLE_TICK_S + IDLE_TICK_S / 2)
            load = bench.loop.load()
            assert load.step == 10
            assert load.step_budget_s == IDLE_TICK_S
            assert bench.executor.began_s == []

    run(scenario())


def test_wake_starts_a_step_at_once() -> None:
    async def scenario() -> None:
        async with running(RecordingExecutor()) as bench:
            await asyncio.sleep(IDLE_TICK_S / 3)
            woken_s = VirtualClock().now()
            await bench.wait_until_finished(bench.add(new_sequence(prompt(3), greedy(1))))
            assert bench.executor.began_s == [woken_s]
            assert VirtualClock().now() - woken_s == pytest.approx(STEP_S)

    run(scenario())


def test_wake_during_a_step_is_not_lost() -> None:
    async def scenario() -> None:
        async with running(RecordingExecutor()) as bench:
            first = bench.add(new_sequence(prompt(3), greedy(1)))
            await asyncio.sleep(STEP_S / 2)
            second = bench.add(new_sequence(prompt(5), greedy(1)))
            await bench.wait_until_finished(first)
            await bench.wait_until_finished(second)
            assert bench.executor.began_s == [0.0, pytest.approx(STEP_S)]

    run(scenario())


def test_one_wake_causes_no_busy_loop() -> None:
    async def scenario() -> None:
        async with running(RecordingExecutor()) as bench:
            await bench.wait_until_finished(bench.add(new_sequence(prompt(3), greedy(1))))
            bench.loop.wake()
            num_steps = bench.loop.load().step
            for _ in range(100):  # no time passes
                await asyncio.sleep(0)
            assert bench.loop.load().step - num_steps <= 2

    run(scenario())


def test_load_reports_the_budget_of_the_current_step() -> None:
    async def scenario() -> None:
        async with running(RecordingExecutor(step_s=30.0)) as bench:
            bench.add(new_sequence(prompt(3), greedy(1)))
            await asyncio.sleep(1.0)
            load = bench.loop.load()
            assert (load.step, load.num_running) == (0, 1)
            assert load.step_budget_s == pytest.approx(300.0)
            assert load.num_total_blocks - load.num_free_blocks == 1
            await asyncio.sleep(30.0)
            assert bench.loop.load().step_budget_s == IDLE_TICK_S

    run(scenario())


class RoutingExecutor(RecordingExecutor):
    """Of every four tokens three go to the first of two experts."""

    async def expert_counts(self) -> NDArray[np.int64]:
        return np.array([[300, 100]]) * self.num_done


def test_load_has_the_imbalance_of_the_experts() -> None:
    async def main() -> None:
        async with running(RoutingExecutor()) as bench:
            assert bench.loop.load().expert_imbalance == 0.0
            await bench.wait_until_finished(bench.add(new_sequence(prompt(3), greedy(4))))
            await VirtualClock().sleep(2 * COUNT_EXPERTS_S)
            assert bench.loop.load().expert_imbalance == 1.5

    run(main())


def test_load_counts_waiting_running_and_reserved() -> None:
    async def scenario() -> None:
        async with running(RecordingExecutor(step_s=1.0), max_sequences=1) as bench:
            bench.add(new_sequence(prompt(9), greedy()))
            bench.add(new_sequence(prompt(7, start=500), greedy()))
            assert bench.engine.reserve(new_sequence(prompt(5, start=700), greedy()))
            await asyncio.sleep(1.5)
            load = bench.loop.load()
            assert (load.step, load.num_running, load.num_waiting) == (1, 1, 1)
            assert (load.num_total_blocks, load.num_free_blocks) == (64, 64 - 3 - 2)
            assert load.num_reserved_blocks == 2
            assert (load.prefill_tokens_in_flight, load.decode_tokens_in_flight) == (7, 9)

    run(scenario())


def test_cached_prefill_is_reported_without_a_step() -> None:
    async def scenario() -> None:
        async with running(RecordingExecutor()) as bench:
            for num_steps in (1, 1):
                prefill = bench.add(new_sequence(prompt(8), None))
                await bench.wait_for_state(prefill, SequenceState.HELD)
                assert len(bench.executor.began_s) == num_steps
                bench.engine.release(prefill)

    run(scenario())


def test_stop_waits_for_the_step_and_leaves_no_task() -> None:
    async def scenario() -> None:
        async with running(RecordingExecutor()) as bench:
            sequence = bench.add(new_sequence(prompt(3), greedy()))
            await asyncio.sleep(STEP_S / 2)
            assert sequence.is_in_step
            await bench.loop.stop()
            assert bench.executor.num_done == 1
            assert bench.tokens(sequence) == solo(tuple(prompt(3)), greedy())[:1]
            assert bench.executor.is_closed
            assert not sequence.is_in_step
            assert asyncio.all_tasks() == {asyncio.current_task()}
            bench.engine.abort(sequence)
            assert bench.engine.pool.num_free_blocks == 64

    run(scenario())


def test_stop_while_idle_is_immediate_and_leaves_no_task() -> None:
    async def scenario() -> None:
        async with running(RecordingExecutor()) as bench:
            await asyncio.sleep(1.0)
            before_s = VirtualClock().now()
            await bench.loop.stop()
            assert VirtualClock().now() == before_s
            assert asyncio.all_tasks() == {asyncio.current_task()}

    run(scenario())


def test_idle_loop_does_not_accumulate_tasks() -> None:
    async def scenario() -> None:
        async with running(RecordingExecutor()) as bench:
            await asyncio.sleep(50 * IDLE_TICK_S)
            # tasks of the test and of the loop, and the two that the loop awaits: tick and wake
            assert len(asyncio.all_tasks()) <= 4
            assert bench.loop.load().step >= 49

    run(scenario())


def test_stop_before_start_closes_the_executor() -> None:
    async def scenario() -> None:
        bench = Bench(RecordingExecutor())
        await bench.loop.stop()
        assert bench.executor.is_closed

    run(scenario())


def test_load_counts_tokens_since_start() -> None:
    async def scenario() -> None:
        async with running(RecordingExecutor()) as bench:
            for num_cached in (0, 2 * BLOCK_SIZE):
                before = bench.loop.load()
                await bench.wait_until_finished(
                    bench.add(new_sequence(prompt(2 * BLOCK_SIZE + 3), greedy(5)))
                )
                load = bench.loop.load()
                assert load.num_generated_tokens - before.num_generated_tokens == 5
                assert load.num_prompt_tokens - before.num_prompt_tokens == 2 * BLOCK_SIZE + 3
                assert load.num_cached_prompt_tokens == num_cached
                num_computed = load.num_computed_prompt_tokens - before.num_computed_prompt_tokens
                assert num_computed == 2 * BLOCK_SIZE + 3 - num_cached

    run(scenario())


def test_resumed_output_does_not_count_as_prompt() -> None:
    async def scenario() -> None:
        async with running(RecordingExecutor()) as bench:
            sequence = new_sequence(prompt(6), greedy(8), output_ids=prompt(3, start=500))
            await bench.wait_until_finished(bench.add(sequence))
            load = bench.loop.load()
            assert load.num_computed_prompt_tokens == 6
            assert load.num_generated_tokens == 5

    run(scenario())


def test_lost_executor_is_noticed_without_work() -> None:
    async def scenario() -> None:
        async with running(RecordingExecutor()) as bench:
            lost = asyncio.Event()
            bench.loop.on_device_lost(lost.set)
            bench.executor.has_ended = True
            async with asyncio.timeout(2 * IDLE_TICK_S):
                await lost.wait()

    run(scenario())


def test_imbalance_is_of_the_worst_layer_since_the_first_counts() -> None:
    load = ExpertLoad()
    assert load.imbalance == 0.0
    load.observe(np.array([[900, 0], [0, 0]]), 5.0)  # of warming up
    assert load.imbalance == 0.0
    load.observe(np.array([[1000, 100], [150, 50]]), 5.0)
    assert load.imbalance == 1.5
    load.observe(np.array([[1300, 200], [150, 450]]), 5.0)
    assert load.imbalance == pytest.approx(1.5)
    assert load.counts is not None
    assert load.counts.tolist() == [[400, 200], [150, 450]]


def test_old_tokens_lose_weight() -> None:
    load = ExpertLoad()
    load.observe(np.array([[0, 0]]), 0.0)
    load.observe(np.array([[800, 0]]), 0.0)
    assert load.imbalance == 2.0
    load.observe(np.array([[800, 400]]), HALF_LIFE_S)
    assert load.imbalance == 1.0


def test_few_tokens_say_nothing() -> None:
    load = ExpertLoad()
    load.observe(np.zeros((2, 4), np.int64), 0.0)
    most = int(LEAST_MEAN * 4)
    load.observe(np.array([[most - 1, 0, 0, 0], [0, 0, 0, 0]]), 0.0)
    assert load.imbalance == 0.0
    load.observe(np.array([[most, 0, 0, 0], [0, 0, 0, 0]]), 0.0)
    assert load.imbalance == 4.0
