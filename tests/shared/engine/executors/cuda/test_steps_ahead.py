"""Steps that are launched before those before them have ended give the tokens of one at a time.

On CPU tensors: a replay computes the step again, and each launch ends before the next one begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.engine.batching.sequence import Sequence, SequenceState
from shared.engine.engine import StepProgress
from shared.engine.executors.cuda.cuda_executor import CudaExecutor
from shared.engine.executors.step_queue import Answer
from shared.engine.step import StepInputs
from shared.messages import SamplingParams
from tests.shared.engine.executors.cuda.test_decode_graphs import Replays, graphs_of, load
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.masked import SumGrammar
from tests.support.engine.model_worker import Worker
from tests.support.engine.rig import new_sequence

NUM_BLOCKS = 6  # few enough that sequences are preempted
EXTRAS: list[dict[str, Any]] = [
    *({}, {}, {}, {"min_tokens": 4}, {"frequency_penalty": 0.5}, {"bad_words": ((17,), (16, 18))}),
    *({"num_logprobs": 2}, {"logit_bias": ((18, 2.0),)}, {"num_prompt_logprobs": 1}),
]


@dataclass
class Request:
    """`at` and `abort_at` are turns of the worker."""

    length: int
    seed: int
    num_tokens: int
    is_greedy: bool
    extra: dict[str, Any]
    num_stops: int
    has_grammar: bool
    num_choices: int
    at: int
    abort_at: int | None
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        return [(self.seed * k + k * k) % 190 + 3 for k in range(self.length)]

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            seed=self.seed,
            max_tokens=self.num_tokens,
            temperature=0.0 if self.is_greedy else 0.9,
            **self.extra,
        )

    def new_choice(self, index: int, stop: tuple[int, ...]) -> Sequence:
        choice = new_sequence(self.prompt, self.sampling, stop=stop, choice_index=index)
        if self.has_grammar:
            choice.grammar = SumGrammar(512, modulus=5, length=6, end=7)
        return choice


REQUESTS = st.builds(
    Request,
    length=st.integers(2, 40),
    seed=st.integers(1, 5),
    num_tokens=st.sampled_from([1, 2, 7, 20]),
    is_greedy=st.booleans(),
    extra=st.sampled_from(EXTRAS),
    num_stops=st.sampled_from([0, 0, 60]),
    has_grammar=st.sampled_from([False, False, False, True]),
    num_choices=st.sampled_from([1, 1, 1, 3]),
    at=st.integers(0, 25),
    abort_at=st.sampled_from([None, None, None, 5, 17]),
    sequences=st.builds(list),
)


@dataclass
class Ahead:
    folder: Path
    plain: CudaExecutor
    ahead: CudaExecutor
    alone: dict[Any, list[int]] = field(default_factory=dict)

    async def tokens_alone(self, request: Request, index: int, stop: tuple[int, ...]) -> list[int]:
        key = repr((request.prompt, request.sampling, request.has_grammar, index, stop))
        if key not in self.alone:
            worker = Worker(self.folder, "float32", executor=self.plain)
            self.alone[key] = await worker.run(request.new_choice(index, stop))
        return self.alone[key]


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead]:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    ahead = load(folder, Replays(), max_graphs=12)
    assert ahead.depth == 2
    yield Ahead(folder, load(folder), ahead)


def test_plain_executor_has_one_step_in_flight(executors: Ahead) -> None:
    assert executors.plain.depth == 1


SCHEDULES = given(
    requests=st.lists(REQUESTS, min_size=1, max_size=5), budget=st.sampled_from([5, 64])
)
SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@settings(max_examples=25, **SLOW)  # type: ignore[arg-type]
@SCHEDULES
def test_tokens_are_those_of_one_step_at_a_time(
    executors: Ahead, requests: list[Request], budget: int
) -> None:
    asyncio.run(check_schedule(executors, requests, budget))


@pytest.mark.long
@settings(max_examples=2000, **SLOW)  # type: ignore[arg-type]
@SCHEDULES
def test_tokens_are_those_of_one_step_at_a_time_in_many_schedules(
    executors: Ahead, requests: list[Request], budget: int
) -> None:
    asyncio.run(check_schedule(executors, requests, budget))


class ForkingWorker(Worker):
    children: dict[Sequence, list[Sequence]]

    def _record(self, progress: StepProgress) -> None:
        super()._record(progress)
        if progress.sequence.state is SequenceState.HELD:
            self.engine.fork(progress.sequence, self.children.pop(progress.sequence))


async def check_schedule(executors: Ahead, requests: list[Request], budget: int) -> None:
    worker = ForkingWorker(
        executors.folder,
        "float32",
        budget=budget,
        executor=executors.ahead,
        most_blocks=NUM_BLOCKS,
    )
    worker.children = {}
    stop = tuple(range(3, 63))
    try:
        await play(worker, requests, stop)
    finally:
        for _, step in worker.in_flight:  # the next schedule has the same executor
            with suppress(Exception):
                await executors.ahead.result(step)
    assert worker.engine.pool.num_free_blocks == NUM_BLOCKS
    await executors.ahead.forget_ended()
    for request in requests:
        for index, choice in enumerate(request.sequences):
            wanted = await executors.tokens_alone(request, index, stop[: request.num_stops])
            found = worker.tokens[choice.sequence_id]
            is_aborted = request.abort_at is not None and index == 0
            assert found == (wanted[: len(found)] if is_aborted else wanted)


async def play(worker: ForkingWorker, requests: list[Request], stop: tuple[int, ...]) -> None:
    turn, has_work = 0, True
    last = max(max(each.at, each.abort_at or 0) for each in requests)
    while has_work or turn <= last:
        for each in requests:
            if each.at == turn:
                start(worker, each, stop[: each.num_stops])
            if each.abort_at == turn and not is_unforked(worker, each):
                worker.engine.abort(each.sequences[0])
        has_work = await worker.turn()
        turn += 1
        assert turn < 2000, "the worker makes no progress"


def is_unforked(worker: ForkingWorker, request: Request) -> bool:
    """Whether its choices do not exist for the engine yet."""
    return not request.sequences or request.sequences in worker.children.values()


def start(worker: ForkingWorker, request: Request, stop: tuple[int, ...]) -> None:
    """Choices are forked from a prefill, unless each token of the prompt has logprobs."""
    is_forked = request.num_choices > 1 and "num_prompt_logprobs" not in request.extra
    num_choices = request.num_choices if is_forked else 1
    request.sequences = [request.new_choice(index, stop) for index in range(num_choices)]
    if not is_forked:
        worker.engine.add(request.sequences[0])
        return
    for each in request.sequences:
        worker.engine.accept(each)
    parent = new_sequence(request.prompt[:-1], None)
    worker.children[parent] = request.sequences
    worker.engine.add(parent)


async def test_host_does_not_know_the_tokens_of_the_step_before(
    executors: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = executors.ahead
    start, input_ids = executor.start, list[list[int]]()

    def started(inputs: StepInputs) -> Answer:
        input_ids.append(inputs.input_ids.tolist())
        return start(inputs)

    monkeypatch.setattr(executor, "start", started)
    worker = Worker(executors.folder, "float32", executor=executor)
    num_replayed = graphs_of(executor).num_replayed
    await worker.run(new_sequence([5, 6, 7], SamplingParams(seed=1, max_tokens=9)))
    assert input_ids == [[5, 6, 7], *[[-1]] * 8]
    assert graphs_of(executor).num_replayed == num_replayed + 8
