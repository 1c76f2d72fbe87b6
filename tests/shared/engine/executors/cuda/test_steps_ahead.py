"""Steps that are launched before those before them have ended give the tokens of one at a time.

On CPU tensors: a replay computes the step again, and each launch ends before the next one begins.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.engine.batching.sequence import Sequence, SequenceState
from shared.engine.engine import StepProgress
from shared.engine.executors.cuda import decode_graphs
from shared.engine.executors.cuda.cuda_executor import CudaExecutor
from shared.engine.executors.cuda.decode_graphs import Graph
from shared.engine.executors.cuda.graph_computer import GraphComputer
from shared.engine.executors.step_computer import StepComputer
from shared.engine.executors.step_deadline import COMPILE_S
from shared.engine.executors.step_queue import Answer
from shared.engine.models.device_step import MISROUTED
from shared.engine.step import KvRun, StepInputs
from shared.messages import SamplingParams
from tests.shared.engine.executors.cuda import late_device
from tests.shared.engine.executors.cuda.fake_device import FakeEvent, Replays, load
from tests.shared.engine.executors.cuda.late_device import LateEvent, LateReplays, load_late
from tests.shared.engine.executors.cuda.test_decode_graphs import graphs_of
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.masked import SumGrammar
from tests.support.engine.model_worker import Worker
from tests.support.engine.rig import new_sequence

MOST_SEEDS = 12  # of schedules in which a race is looked for
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
    """`late` is on a device that does its work late."""

    folder: Path
    plain: CudaExecutor
    ahead: CudaExecutor
    late: CudaExecutor
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
    yield Ahead(folder, load(folder), ahead, load_late(folder, seed=1))


def test_plain_executor_has_one_step_in_flight(executors: Ahead) -> None:
    assert executors.plain.depth == 1


SCHEDULES = given(
    requests=st.lists(REQUESTS, min_size=1, max_size=5),
    budget=st.sampled_from([5, 64]),
    is_late=st.booleans(),
)
SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@settings(max_examples=12, **SLOW)  # type: ignore[arg-type]
@SCHEDULES
def test_tokens_are_those_of_one_step_at_a_time(
    executors: Ahead, requests: list[Request], budget: int, is_late: bool
) -> None:
    executor = executors.late if is_late else executors.ahead
    asyncio.run(check_schedule(executors, executor, requests, budget))


@pytest.mark.long
@settings(max_examples=2000, **SLOW)  # type: ignore[arg-type]
@SCHEDULES
def test_tokens_are_those_of_one_step_at_a_time_in_many_schedules(
    executors: Ahead, requests: list[Request], budget: int, is_late: bool
) -> None:
    executor = executors.late if is_late else executors.ahead
    asyncio.run(check_schedule(executors, executor, requests, budget))


class ForkingWorker(Worker):
    children: dict[Sequence, list[Sequence]]

    def _record(self, progress: StepProgress) -> None:
        super()._record(progress)
        if progress.sequence.state is SequenceState.HELD:
            self.engine.fork(progress.sequence, self.children.pop(progress.sequence))


async def check_schedule(
    executors: Ahead, executor: Any, requests: list[Request], budget: int
) -> None:
    worker = ForkingWorker(
        executors.folder, "float32", budget=budget, executor=executor, most_blocks=NUM_BLOCKS
    )
    worker.children = {}
    stop = tuple(range(3, 63))
    try:
        await play(worker, requests, stop)
    finally:
        for _, step in worker.in_flight:  # the next schedule has the same executor
            with suppress(Exception):
                await executor.result(step)
    assert worker.engine.pool.num_free_blocks == NUM_BLOCKS
    await executor.forget_ended()
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


def random_requests(seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            length=rng.randint(2, 40),
            seed=rng.randint(1, 5),
            num_tokens=rng.choice([7, 20]),
            is_greedy=rng.random() < 0.5,
            extra=rng.choice([{}, {}, {}, {"num_logprobs": 2}]),
            num_stops=0,
            has_grammar=False,
            num_choices=rng.choice([1, 1, 3]),
            at=rng.randint(0, 12),
            abort_at=None,
        )
        for _ in range(4)
    ]


def one_buffer(buffers: list[Any]) -> Iterator[Any]:
    return repeat(buffers[0])


def upload_at_once(self: LateReplays, source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def download_at_once(self: LateReplays, values: Tensor) -> Tensor:
    return values.clone()


def nothing(*_: object) -> None: ...


# A wait that is missing, or work that is done too early
RACES: dict[str, tuple[object, str, Any]] = {
    "one buffer of the host": (decode_graphs, "cycle", one_buffer),
    "upload beside the step": (LateReplays, "upload", upload_at_once),
    "download beside the step": (LateReplays, "download", download_at_once),
    "no wait for tokens": (LateEvent, "synchronize", nothing),
    "tokens of a capture stay": (decode_graphs, "_restored", lambda _: nullcontext()),
    "tokens of the host are not kept": (GraphComputer, "_keep_tokens", nothing),
}


@pytest.mark.parametrize("race", RACES)
def test_planted_race_is_found(
    executors: Ahead, race: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, planted = RACES[race]
    monkeypatch.setattr(owner, name, planted)
    monkeypatch.setattr(decode_graphs, "FIRST_ROWS", 1)  # others are captured beside a step
    with pytest.raises((AssertionError, IndexError)):
        for seed in range(MOST_SEEDS):
            executor = load_late(executors.folder, seed)
            asyncio.run(check_late(executors, executor, seed))


def test_no_race_is_found_where_none_is(executors: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "FIRST_ROWS", 1)
    for seed in range(3):
        asyncio.run(check_late(executors, load_late(executors.folder, seed), seed))


async def check_late(executors: Ahead, executor: CudaExecutor, seed: int) -> None:
    """Checks the tokens of a schedule, and the KV of a prompt that is read beside other steps."""
    await check_schedule(executors, executor, random_requests(seed), budget=64)
    found = [await kv_of_prompt(executors.folder, each) for each in (executor, executors.plain)]
    assert found[0] == found[1], "the KV of a prompt is read before it is computed"
    await executor.close()


async def kv_of_prompt(folder: Path, executor: CudaExecutor) -> bytes:
    worker = Worker(folder, "float32", executor=executor)
    beside = new_sequence([5, 6, 7], SamplingParams(seed=1, max_tokens=12, temperature=0.0))
    pushed = new_sequence(list(range(70, 110)), None)
    worker.engine.add(beside)
    for _ in range(3):
        await worker.turn()
    worker.engine.add(pushed)
    while pushed.state is not SequenceState.HELD:
        await worker.turn()
    num_tokens = pushed.num_tokens
    payload = memoryview(bytearray(num_tokens * executor.kv_layout.group_bytes_per_token(0)))
    await executor.read_kv(KvRun(pushed.block_tables[0], 0, num_tokens, 0), payload)
    worker.engine.release(pushed)
    await worker.run_on()
    await executor.forget_ended()
    return bytes(payload)


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


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_decode_step_is_one_copy_each_way_one_launch_and_one_wait(
    executors: Ahead, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()

    def count(owner: type, name: str) -> None:
        call = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            counts[name] += 1
            return call(*arguments)

        monkeypatch.setattr(owner, name, counted)

    worker = Worker(executors.folder, "float32", executor=executors.ahead)
    sampling = SamplingParams(seed=1, max_tokens=9, temperature=temperature)
    worker.engine.add(new_sequence([5, 6, 7], sampling))
    await worker.turn()  # the prompt, and the first token
    await executors.ahead.expert_counts()  # on the thread of the steps: the launch has ended
    for name in ("upload", "download"):
        count(Replays, name)
    count(FakeEvent, "synchronize")
    count(Graph, "run")
    count(StepComputer, "device_inputs")
    await worker.run_on()
    assert counts == {"upload": 8, "run": 8, "download": 8, "synchronize": 9}


async def test_check_reads_its_tokens_once_the_device_has_them(
    executors: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of the host may still have the token that stands for the failure of a step."""
    monkeypatch.setattr(late_device, "POISON", MISROUTED)
    for seed in range(3):
        await load_late(executors.folder, seed).check()


async def test_check_of_a_worker_of_one_sequence_keeps_the_tokens_in_their_place(
    executors: Ahead,
) -> None:
    """Its rows are more than any step's; graphs have the address."""
    executor = load(executors.folder)
    executor.computer.use_graphs(Replays(), max_rows=1, max_graphs=1)
    tokens = executor.computer.last_tokens
    assert tokens is not None
    address = tokens.data_ptr()
    await executor.check()
    assert tokens.data_ptr() == address


async def test_kernel_that_a_step_compiles_at_once_extends_its_budget(
    executors: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = executors.ahead
    start = executor.start

    def started(inputs: StepInputs) -> Answer:
        executor._budget.compiling()
        return start(inputs)

    monkeypatch.setattr(executor, "start", started)
    worker = Worker(executors.folder, "float32", executor=executor)
    worker.engine.add(new_sequence([5, 6, 7], SamplingParams(seed=1, max_tokens=1)))
    rows, _ = worker.engine.schedule()
    step = executor.submit(rows)
    assert executor.step_extension_s == COMPILE_S
    worker.engine.apply(rows, await executor.result(step))
