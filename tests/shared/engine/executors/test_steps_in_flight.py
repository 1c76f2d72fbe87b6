"""Several steps in flight give each sequence the tokens that it has alone, one step at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from shared.background import start_awaited
from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.batching.sequence import Sequence, SequenceState
from shared.engine.engine import Engine, StepProgress
from shared.engine.executors.step_queue import MOST_AHEAD, Answer, StepQueue
from shared.engine.executors.timing_executor import StepCost, TimingExecutor
from shared.engine.loop import IDLE_TICK_S, EngineLoop
from shared.engine.step import StepInputs, StepOutput
from shared.engine.step_plan import StepPlan
from shared.kv_layout import Reach, Window, first_seen
from shared.messages import SamplingParams
from tests.shared.engine.executors.group_in_process import group_in_process
from tests.shared.engine.test_engine_operations import (
    LATE_AT,
    PROMPTS,
    STOPS,
    SUBMITTED_SAMPLINGS,
    VOCAB_SIZE,
    late_grammar,
)
from tests.support.engine.plain_inputs import UNKNOWN, plain_inputs
from tests.support.engine.planned_rig import comparable
from tests.support.engine.rig import (
    BLOCK_SIZE,
    Rig,
    greedy,
    new_sequence,
    prompt,
    seeded,
    solo,
)
from tests.support.world.clock import VirtualClock, run

STEP_S = 0.01
POISON = 777
SHAPES = [(1, 1), (2, 1), (3, 1), (2, 2), (3, 3)]  # depth, stages
SUBMITTING = (  # what a step that cannot be submitted fails in, of each executor
    "shared.engine.executors.rank_state._blocks_of",
    "shared.engine.executors.timing_executor.encode",
    "shared.engine.executors.group.group_executor.encode",
)
FAILING = ("submit", "apply", "run")  # where a step fails: `apply` is of a plan in flight


@contextmanager
def failing(functions: tuple[str, ...]) -> Iterator[None]:
    with ExitStack() as patches:
        for each in functions:
            error = MemoryError("the device says no")
            patches.enter_context(mock.patch(each, side_effect=error))
        yield


class CheckedExecutor(TimingExecutor):
    """Raises in the steps `fail_at`, in one of `FAILING`, and with a poisonous token. Blocks of a
    step stay held; its inputs are those that its sequences gave when it was submitted.

    Records how many steps were in flight, and in how many of them each row was.
    """

    def __init__(
        self,
        num_blocks: int,
        fail_at: frozenset[int] = frozenset(),
        reaches: tuple[Reach, ...] = (None,),
        shape: tuple[int, int] = (1, 1),
        *,
        fails_in: str = "run",
    ) -> None:
        depth, num_stages = shape
        super().__init__(
            VirtualClock(),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
            cost=StepCost(STEP_S, 0.0, 0.0),
            reaches=reaches,
            depth=depth,
            num_stages=num_stages,
        )
        self.fail_at = {each: fail_at if each == fails_in else frozenset() for each in FAILING}
        self.num_submitted = self.num_applied = self.num_runs = 0
        self.wrongs: list[str] = []
        self.engine: Engine | None = None
        self.most_in_flight = self.most_tokens = self.most_rows = 0
        self.rows: dict[int, list[ScheduledSequence]] = {}
        self.expected: deque[StepInputs] = deque()  # of steps in flight
        self.rank_state = self._state

    async def run(self, inputs: StepInputs) -> StepOutput:
        self.num_runs += 1
        number = self.num_runs
        output = await super().run(inputs)
        self.check_held(inputs)
        self.check_inputs(inputs, self.expected.popleft())
        if number in self.fail_at["run"] or POISON in inputs.input_ids:
            raise RuntimeError("the device says no")
        return output

    def check_held(self, inputs: StepInputs) -> None:
        """Every block that the step reads or writes is held, and what it writes by one sequence."""
        assert self.engine is not None
        pool = self.engine.pool
        starts = (inputs.context_lens - inputs.query_lens).tolist()
        lengths = inputs.context_lens.tolist()
        for tables, reach in zip(inputs.block_tables, pool.reaches, strict=True):
            for table, start, length in zip(tables, starts, lengths, strict=True):
                first = first_seen(reach, start) // BLOCK_SIZE
                read = table[first : -(-length // BLOCK_SIZE)].tolist()
                if not all(pool.ref_count(each) > 0 for each in read):
                    self.wrongs.append("a step uses a free block")
        written = (inputs.slot_mapping // BLOCK_SIZE).ravel().tolist()
        copying = {id(each): each for rows in self.rows.values() for each in rows}
        sources = [  # their rows hold them, too, also those of a failed step
            source
            for each in copying.values()
            if each.block_copies and each in each.sequence.in_flight
            for source, _ in each.block_copies
        ]
        if not all(pool.ref_count(each) - sources.count(each) == 1 for each in written):
            self.wrongs.append("a written block is shared")

    def check_inputs(self, inputs: StepInputs, expected: StepInputs) -> None:
        """Sums of chunks are known where no step in flight computes them."""
        known = np.where(expected.input_ids == UNKNOWN, UNKNOWN, inputs.input_ids)
        pooling = {
            index: each if expected.pooling[index].before is not None else expected.pooling[index]
            for index, each in inputs.pooling.items()
        }
        found = msgspec.structs.replace(inputs, input_ids=known, pooling=pooling)
        if comparable(found) != comparable(expected):
            self.wrongs.append(f"the inputs of a step are {found}, expected {expected}")

    def submit(self, rows: list[ScheduledSequence]) -> int:
        self.num_submitted += 1
        self.check_rows(rows)
        expected = plain_inputs(rows, BLOCK_SIZE)
        self.expected.append(expected)
        try:
            step = self._submit_or_fail(rows)
        except BaseException:
            self.expected.pop()
            self.rows[-self.num_submitted] = rows  # they hold what they copy until they leave it
            raise
        self.most_in_flight = max(self.most_in_flight, self._num_in_flight)
        self.rows[step] = rows
        if self.num_stages > 1:
            self.check_draws_alone()
        return step

    def check_rows(self, rows: list[ScheduledSequence]) -> None:
        """Single tokens come first, and the step is within the limits, also one of failed rows."""
        counts = [row.num_scheduled_tokens for row in rows]
        if any(count > 1 and later == 1 for count, later in pairwise(counts)):
            self.wrongs.append("a single token comes after several")
        if sum(counts) > self.most_tokens or len(rows) > self.most_rows:
            self.wrongs.append("a step is larger than any may be")

    def _submit_or_fail(self, rows: list[ScheduledSequence]) -> int:
        with failing(SUBMITTING if self.num_submitted in self.fail_at["submit"] else ()):
            return self.submit_rows(rows)

    def _inputs_of(self, plan: StepPlan, masks: Any) -> StepInputs:
        self.num_applied += 1
        with failing(SUBMITTING[:1] if self.num_applied in self.fail_at["apply"] else ()):
            try:
                return super()._inputs_of(plan, masks)
            except BaseException:
                if self._runs_ahead:
                    self.expected.popleft()
                raise

    def submit_rows(self, rows: list[ScheduledSequence]) -> int:
        return super().submit(rows)

    @property
    def steps_in_flight(self) -> list[int]:
        return sorted(self._steps)

    def check_draws_alone(self) -> None:
        """A row that draws in one step in flight is in no later one."""
        drawing: set[Sequence] = set()
        for step in self.steps_in_flight:
            assert drawing.isdisjoint(row.sequence for row in self.rows[step])
            drawing.update(row.sequence for row in self.rows[step] if row.completes)


class CheckedGroup(CheckedExecutor):
    """The same, as the rank of a group: a step fails after the rank has recorded it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.group = group_in_process(self, VirtualClock(), STEP_S)
        self.rank_state = self.group._steps.rank_state
        self.check, self.result = self.group.check, self.group.result
        self.forget_ended, self.submit_rows = self.group.forget_ended, self.group.submit

    @property
    def steps_in_flight(self) -> list[int]:
        return sorted(self.group._in_flight)

    @property
    def _num_in_flight(self) -> int:
        return len(self.group._in_flight)


class CheckedAhead(CheckedExecutor):
    """The same, with steps that are launched ahead: they name tokens by their places in the output
    of the step before. A step that fails leaves tokens of an earlier one there.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.queue = StepQueue(BLOCK_SIZE, len(self.kv_layout.groups), self.start)
        self.rank_state, self.result = self.queue.state, self.queue.result
        self.last_tokens = [0] * 64
        self.previous: asyncio.Task[StepOutput] | None = None

    def submit_rows(self, rows: list[ScheduledSequence]) -> int:
        return self.queue.submit(rows, self.depth)

    async def forget_ended(self) -> None:
        self.queue.end_rows()

    @property
    def _num_in_flight(self) -> int:
        return len(self.queue)

    def start(self, inputs: StepInputs) -> Answer:
        self.num_applied += 1
        if self.num_applied in self.fail_at["apply"]:
            self.expected.pop()
            raise MemoryError("the device says no")
        task = self.previous = start_awaited(self.after(self.previous, inputs))

        async def answer() -> StepOutput:
            await asyncio.wait((task,))
            return task.result()

        return answer

    async def after(
        self, previous: asyncio.Task[StepOutput] | None, inputs: StepInputs
    ) -> StepOutput:
        if previous is not None:
            await asyncio.wait((previous,))
        ids = [self.last_tokens[-1 - id] if id < 0 else id for id in inputs.input_ids.tolist()]
        output = await self.run(msgspec.structs.replace(inputs, input_ids=np.array(ids)))
        self.last_tokens[: len(output.token_ids)] = output.token_ids
        return output


class Worker:
    def __init__(self, executor: CheckedExecutor, **options: Any) -> None:
        self.executor = executor
        limits = {"max_batch_tokens": 64, "max_sequences": 8, **options}
        executor.most_tokens = limits["max_batch_tokens"]
        executor.most_rows = limits["max_sequences"]
        self.engine = executor.engine = Engine(
            num_blocks=executor.num_blocks,
            block_size=BLOCK_SIZE,
            max_context_tokens=executor.max_context_tokens,
            reaches=executor.kv_layout.reaches,
            **limits,
        )
        self.loop = EngineLoop(self.engine, executor, VirtualClock())
        self.loop.listen(self.record)
        self.tokens: dict[Sequence, list[int]] = {}
        self.endings: dict[Sequence, StepProgress] = {}
        self.children: dict[Sequence, list[Sequence]] = {}
        self.changed = asyncio.Event()

    def record(self, progress: list[StepProgress]) -> None:
        self.engine.pool.check()
        for each in progress:
            sequence = each.sequence
            assert sequence not in self.endings, "progress after the ending"
            self.tokens.setdefault(sequence, []).extend(each.token_ids)
            if each.finish_reason is not None:
                self.endings[sequence] = each
            if sequence.state is SequenceState.HELD:
                self.fork_or_release(sequence)
        self.changed.set()

    def fork_or_release(self, parent: Sequence) -> None:
        children = self.children.pop(parent, [])
        if parent.num_uncomputed_tokens or not children:  # its step failed
            self.engine.release(parent)
        else:
            self.engine.fork(parent, children)
        self.loop.wake()

    def add(self, sequence: Sequence, children: list[Sequence] | None = None) -> None:
        for child in children or []:
            self.engine.accept(child)
        self.children[sequence] = children or []
        self.engine.add(sequence)
        self.loop.wake()

    async def idle(self) -> None:
        async with asyncio.timeout(1000):
            while not self.engine.is_idle:
                self.changed.clear()
                await self.changed.wait()


@dataclass
class Submission:
    ids: list[int]
    sampling: SamplingParams
    stop: tuple[int, ...]
    late_at: set[int] | None
    num_choices: int  # more than one: forked from a prefill
    after_s: float
    abort_after_s: float | None
    is_poisonous: bool = False
    choices: list[Sequence] = field(default_factory=list)

    def start(self, worker: Worker) -> None:
        ids = [*self.ids, POISON] if self.is_poisonous else self.ids
        for index in range(self.num_choices):
            choice = new_sequence(ids, self.sampling, stop=self.stop, choice_index=index)
            choice.grammar = late_grammar(self.late_at, [])
            self.choices.append(choice)
        if self.num_choices == 1:
            worker.add(self.choices[0])
        else:
            worker.add(new_sequence(ids[:-1], None), self.choices)

    async def play(self, worker: Worker) -> None:
        await asyncio.sleep(self.after_s)
        self.start(worker)
        if self.abort_after_s is not None:
            await asyncio.sleep(self.abort_after_s)
            worker.engine.abort(self.choices[0])

    def check(self, worker: Worker) -> None:
        for index, choice in enumerate(self.choices):
            tokens = worker.tokens.get(choice, [])
            if self.is_poisonous:
                assert tokens == []
                continue
            expected = solo(tuple(self.ids), self.sampling, self.stop, index, VOCAB_SIZE)
            if self.abort_after_s is None or index > 0:
                assert tokens == expected
                assert worker.endings[choice].finish_reason in ("stop", "length")
            else:
                assert tokens == expected[: len(tokens)]


@cache
def solo_embedding(ids: tuple[int, ...]) -> list[float]:
    rig = Rig(max_batch_tokens=4096)
    sequence = rig.add(new_sequence(ids, None, pooling="mean"))
    rig.run()
    return rig.endings[sequence.sequence_id].embedding.tolist()


TIMES = st.integers(0, 30).map(lambda n: n * STEP_S * 0.7)
SUBMISSIONS = st.builds(
    Submission,
    ids=PROMPTS.filter(lambda ids: len(ids) > 1),
    sampling=SUBMITTED_SAMPLINGS,
    stop=STOPS,
    late_at=LATE_AT,
    num_choices=st.just(1),
    after_s=TIMES,
    abort_after_s=st.none() | TIMES,
    is_poisonous=st.just(False),
    choices=st.builds(list),
)


def forked(submission: Submission, num_choices: int) -> Submission:
    """A prefill whose choices start together, so that they share its blocks."""
    submission.num_choices = num_choices
    submission.abort_after_s = submission.late_at = None
    if submission.sampling.num_prompt_logprobs is not None:
        submission.sampling = seeded(12)
    return submission


CASES = given(
    shape=st.sampled_from(SHAPES),
    kind=st.sampled_from([CheckedExecutor, CheckedGroup, CheckedAhead]),
    submissions=st.lists(SUBMISSIONS, min_size=1, max_size=5),
    forks=st.lists(st.builds(forked, SUBMISSIONS, st.integers(2, 3)), max_size=1),
    embedded=st.lists(PROMPTS, max_size=2),
    num_blocks=st.sampled_from([13, 14, 40]),
    budget=st.sampled_from([3, 5, 64]),
    num_sequences=st.sampled_from([2, 5]),
    reaches=st.sampled_from([(None,), (None,), (Window(9),), (None, Window(5))]),
    fail_at=st.frozensets(st.sampled_from([2, 9, 30])),
    fails_in=st.sampled_from(FAILING),
    poisons=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@CASES
def test_tokens_do_not_depend_on_the_steps_in_flight(**case: Any) -> None:
    check_case(**case)


@pytest.mark.long
@settings(max_examples=5000, deadline=None)
@CASES
def test_tokens_do_not_depend_on_the_steps_in_flight_of_many_schedules(**case: Any) -> None:
    check_case(**case)


def check_case(
    shape: tuple[int, int],
    kind: type[CheckedExecutor],
    submissions: list[Submission],
    forks: list[Submission],
    embedded: list[list[int]],
    num_blocks: int,
    budget: int,
    num_sequences: int,
    reaches: tuple[Reach, ...],
    fail_at: frozenset[int],
    fails_in: str,
    poisons: bool,
) -> None:
    if poisons:  # no passing error besides: it could hit a row that is computed alone
        submissions[-1].is_poisonous = True
        fail_at = frozenset()

    if kind is CheckedGroup:
        shape = shape[1], shape[1]
    elif kind is CheckedAhead:
        shape = min(shape[0], MOST_AHEAD), 1

    async def scenario() -> None:
        worker = Worker(
            kind(num_blocks * len(reaches), fail_at, reaches, shape, fails_in=fails_in),
            max_batch_tokens=budget,
            max_sequences=num_sequences,
        )
        worker.loop.start()
        embeddings = [new_sequence(ids, None, pooling="mean") for ids in embedded]
        for each in embeddings:
            worker.add(each)
        await asyncio.gather(*(each.play(worker) for each in [*submissions, *forks]))
        await worker.idle()
        assert worker.engine.pool.num_free_blocks == num_blocks * len(reaches)
        assert worker.executor.most_in_flight <= shape[0]
        await asyncio.sleep(2 * IDLE_TICK_S)
        await worker.loop.stop()
        assert worker.executor.wrongs == []
        assert worker.executor.rank_state._special == {}
        assert not worker.executor.rank_state._num_blocks.any(), "no row is left on an idle rank"
        for each in [*submissions, *forks]:
            each.check(worker)
        for ids, sequence in zip(embedded, embeddings, strict=True):
            assert worker.endings[sequence].embedding.tolist() == solo_embedding(tuple(ids))

    with capture_logs():  # rendering a traceback takes longer than the example
        run(scenario())


@pytest.mark.parametrize(("shape", "most"), [((2, 1), 2), ((3, 1), 3), ((2, 2), 1)])
def test_decode_runs_ahead_where_the_device_holds_its_token(
    shape: tuple[int, int], most: int
) -> None:
    async def scenario() -> None:
        worker = Worker(CheckedExecutor(40, shape=shape))
        sequence = new_sequence(prompt(3), greedy(12))
        worker.add(sequence)
        worker.loop.start()
        await worker.idle()
        await worker.loop.stop()
        assert worker.executor.most_in_flight == most
        assert worker.executor.num_runs == 12, "max_tokens is known ahead: no step is in vain"
        assert worker.tokens[sequence] == solo(tuple(prompt(3)), greedy(12), vocab_size=VOCAB_SIZE)

    run(scenario())


@pytest.mark.parametrize(
    "later",
    [
        {"sampling": None, "pooling": "last"},
        {"sampling": SamplingParams(seed=1, max_tokens=4, num_logprobs=1)},
        {"sampling": SamplingParams(seed=1, max_tokens=4, num_prompt_logprobs=1)},
    ],
)
async def test_launch_that_waits_for_its_results_comes_after_the_answer_before_it(
    later: dict[str, Any],
) -> None:
    started: list[StepInputs] = []

    def start(inputs: StepInputs) -> Answer:
        started.append(inputs)
        return partial(asyncio.sleep, 0, StepOutput([5]))

    engine, queue = Rig().engine, StepQueue(BLOCK_SIZE, 1, start)
    engine.add(new_sequence(prompt(3), greedy(4)))
    first = queue.submit(engine.schedule(samples_ahead=True)[0], MOST_AHEAD)
    engine.add(new_sequence(prompt(3, start=300), **later))
    queue.submit(engine.schedule(samples_ahead=True)[0], MOST_AHEAD)
    assert len(started) == 1
    await queue.result(first)
    assert len(started) == 2


def test_chunks_of_a_prompt_fill_a_pipeline() -> None:
    async def scenario() -> None:
        worker = Worker(CheckedExecutor(40, shape=(3, 3)), max_batch_tokens=4)
        worker.add(new_sequence(prompt(20), greedy(1)))
        worker.loop.start()
        await worker.idle()
        await worker.loop.stop()
        assert (worker.executor.most_in_flight, worker.executor.num_runs) == (3, 5)

    run(scenario())


@pytest.mark.parametrize("num_stages", [2, 3])
def test_rows_of_a_pipeline_are_spread_over_its_steps(num_stages: int) -> None:
    """All in one step would leave all stages but one idle."""

    async def scenario() -> None:
        worker = Worker(CheckedExecutor(80, shape=(num_stages, num_stages)))
        for n in range(7):
            worker.add(new_sequence(prompt(3, start=100 + 9 * n), greedy(10)))
        worker.loop.start()
        await worker.idle()
        await worker.loop.stop()
        sizes = [len(rows) for rows in worker.executor.rows.values()]
        assert sizes[0] == 7, "prompts are computed together"
        usual = sizes[num_stages:-num_stages]
        assert max(usual) == -(-7 // num_stages)
        assert worker.executor.most_in_flight == num_stages

    run(scenario())


def test_a_stop_is_seen_one_step_late_and_its_blocks_stay_until_then() -> None:
    async def scenario() -> None:
        expected = solo(tuple(prompt(4)), greedy(30), vocab_size=VOCAB_SIZE)
        stop = expected[4]
        num_tokens = expected.index(stop)
        worker = Worker(CheckedExecutor(40, shape=(2, 1)))
        sequence = new_sequence(prompt(4), greedy(30), stop=(stop,))
        worker.add(sequence)
        worker.loop.start()
        while sequence not in worker.endings:
            worker.changed.clear()
            await worker.changed.wait()
        assert sequence.state is SequenceState.FINISHED
        assert worker.tokens[sequence] == expected[:num_tokens]
        assert worker.engine.pool.num_free_blocks < 40
        assert not worker.engine.is_idle
        await worker.idle()
        assert worker.engine.pool.num_free_blocks == 40
        assert worker.executor.num_runs == num_tokens + 2
        await worker.loop.stop()

    run(scenario())


@pytest.mark.parametrize(("fails_in", "num_more_runs"), [("run", 3), ("apply", 1)])
def test_rows_of_a_failed_step_and_of_those_after_it_are_computed_again(
    fails_in: str, num_more_runs: int
) -> None:
    """More runs: the failed step and the void one after it, if they run, and one for each half."""

    async def scenario() -> None:
        worker = Worker(CheckedExecutor(40, frozenset({4}), shape=(2, 1), fails_in=fails_in))
        sequences = [new_sequence(prompt(3, start=n), greedy(8)) for n in (100, 300)]
        for each in sequences:
            worker.add(each)
        worker.loop.start()
        await worker.idle()
        for start, each in zip((100, 300), sequences, strict=True):
            ids = tuple(prompt(3, start=start))
            assert worker.tokens[each] == solo(ids, greedy(8), vocab_size=VOCAB_SIZE)
        assert worker.loop.load().num_failed_steps == 1
        assert worker.executor.num_runs == 8 + num_more_runs
        await worker.loop.stop()

    run(scenario())


def test_rows_of_two_failed_steps_are_computed_apart() -> None:
    """A part with rows of both would not begin with its single tokens."""

    async def scenario() -> None:
        worker = Worker(CheckedExecutor(40, frozenset({1, 2}), shape=(2, 1)), max_batch_tokens=4)
        prompts = [prompt(4, start=100), *([300 + n] for n in range(3))]
        sequences = [new_sequence(each, greedy(5)) for each in prompts]
        for each in sequences:
            worker.add(each)
        worker.loop.start()
        await worker.idle()
        for ids, each in zip(prompts, sequences, strict=True):
            assert worker.tokens[each] == solo(tuple(ids), greedy(5), vocab_size=VOCAB_SIZE)
        assert worker.executor.wrongs == []
        await worker.loop.stop()

    run(scenario())
