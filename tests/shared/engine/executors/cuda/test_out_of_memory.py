"""A device that has too little memory for a step, at some size, in some phase or at random: no row
is lost, and the tokens are those of a device with enough. On CPU tensors.
"""

from __future__ import annotations

import asyncio
import random
import weakref
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.clock import MonotonicClock
from shared.engine.batching.sequence import Sequence, SequenceState
from shared.engine.batching.step_limit import FLOOR_TOKENS
from shared.engine.engine import Engine, StepProgress
from shared.engine.executors import step_computer
from shared.engine.executors.cuda import decode_graphs
from shared.engine.executors.cuda.cuda_device import is_out_of_memory, telling_of_memory
from shared.engine.executors.cuda.cuda_executor import CudaExecutor
from shared.engine.loop import EngineLoop
from shared.engine.step import KvRun
from shared.errors import HearthError, OutOfMemory
from shared.messages import SamplingParams
from tests.shared.engine.executors.cuda.fake_device import FakeDriver, Replays, load
from tests.shared.engine.executors.cuda.late_device import load_late
from tests.shared.engine.executors.cuda.test_decode_graphs import graphs_of
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.model_worker import Worker
from tests.support.engine.rig import new_sequence
from tests.support.engine.steps import Blocks, prefill

BUDGET, POISON = 64, 250
STEP_PHASES = ("_computed", "output", "_keep_tokens", "pooled", "prompt_logprobs", "logits")
OTHER_PHASES = ("_captured", "zero_blocks")
IsShort = Callable[[str, int], bool]  # phase, tokens of the step


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has")


class Memory:
    """Lets operations of an executor raise before or after they are done, where `is_short`."""

    def __init__(self, executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_short: IsShort = lambda phase, num_tokens: False
        self.num_raised = 0
        self.is_late = False  # raise once the work is done
        self.sizes: list[int] = []  # tokens of the steps that were launched
        self._num_tokens, self._monkeypatch = 0, monkeypatch
        computer = executor.computer
        for owner, name in (
            *((computer, each) for each in (*STEP_PHASES[:3], "zero_blocks", "read_kv")),
            *((computer, each) for each in ("write_kv",)),
            *((step_computer, each) for each in ("pooled", "prompt_logprobs")),
            (computer.model, "logits"),
            (computer.graphs, "_captured"),
        ):
            self._watch(owner, name)

    def _watch(self, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if name == "_computed":
                self._num_tokens = len(arguments[0].input_ids)
                self.sizes.append(self._num_tokens)
            is_short = self.is_short(name, self._num_tokens)
            self.num_raised += is_short
            if is_short and not self.is_late:
                raise out_of_memory()
            result = real(*arguments, **options)
            if is_short:
                raise out_of_memory()
            return result

        self._monkeypatch.setattr(owner, name, call)


class Server:
    """An engine's loop over the executor, which stays open."""

    def __init__(self, executor: CudaExecutor, **options: Any) -> None:
        self.engine = Engine(
            num_blocks=executor.num_blocks,
            block_size=executor.kv_layout.block_size,
            max_context_tokens=executor.max_context_tokens,
            max_batch_tokens=BUDGET,
            max_sequences=16,
            **options,
        )
        self.loop = EngineLoop(self.engine, executor, MonotonicClock())
        self.loop.listen(self._record)
        self.loop.on_device_lost(lambda: pytest.fail("the device counts as lost"))
        self.tokens: dict[Sequence, list[int]] = defaultdict(list)
        self.errors: dict[Sequence, HearthError] = {}
        self.endings: dict[Sequence, StepProgress] = {}
        self.children: dict[Sequence, list[Sequence]] = {}
        self._ended = asyncio.Event()

    def _record(self, progress: list[StepProgress]) -> None:
        for each in progress:
            sequence = each.sequence
            self.tokens[sequence] += each.token_ids
            if each.error is not None:
                self.errors[sequence] = each.error
            if each.finish_reason is not None:
                self.endings[sequence] = each
                self._ended.set()
            if sequence.state is SequenceState.HELD and sequence in self.children:
                self.engine.fork(sequence, self.children.pop(sequence))

    def add(self, *sequences: Sequence) -> None:
        for each in sequences:
            self.engine.add(each)
        self.loop.wake()

    async def ended(self, *sequences: Sequence) -> None:
        async with asyncio.timeout(60):
            while not set(sequences) <= self.endings.keys():
                self._ended.clear()
                await self._ended.wait()


@asynccontextmanager
async def serving(
    executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> AsyncIterator[Server]:
    async def stay_open() -> None: ...

    monkeypatch.setattr(executor, "close", stay_open)
    server = Server(executor, **options)
    server.loop.start()
    try:
        yield server
    finally:
        await server.loop.stop()
        await executor.forget_ended()
        await executor._captures.stop()
    server.engine.pool.check()
    assert server.engine.is_idle
    assert server.engine.pool.num_free_blocks == executor.num_blocks
    assert server.loop.load().num_failed_steps == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    return Alone(folder)


@pytest.fixture(scope="module")
def opened(folder: Path) -> list[CudaExecutor]:
    """Two steps in flight, on a device that works at once and on one that works late."""
    return [load(folder, Replays(), max_graphs=12), load_late(folder, seed=2)]


@pytest.fixture(params=[0, 1], ids=["at once", "late"])
def executor(opened: list[CudaExecutor], request: pytest.FixtureRequest) -> Iterator[CudaExecutor]:
    executor = opened[request.param]
    graphs_of(executor).clear()
    yield executor


@pytest.fixture
def memory(executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch) -> Memory:
    return Memory(executor, monkeypatch)


def sampled(seed: int, length: int, num_tokens: int = 12, **options: Any) -> Sequence:
    ids = [(seed * k + k * k) % 190 + 3 for k in range(length)]
    temperature = 0.0 if seed % 2 else 0.9
    params = SamplingParams(seed=seed, max_tokens=num_tokens, temperature=temperature, **options)
    return new_sequence(ids, params)


def mixed(seed: int = 0) -> list[Sequence]:
    extras: list[dict[str, Any]] = [{}, {"num_logprobs": 2}, {"num_prompt_logprobs": 1}]
    extras += [{}, {"frequency_penalty": 0.5}, {"bad_words": ((17,), (16, 18))}]
    found = [
        sampled(seed + n + 1, 5 + (11 * n + seed) % 50, **extra) for n, extra in enumerate(extras)
    ]
    embedding = new_sequence([(7 * k + seed) % 190 + 3 for k in range(70)], None, pooling="mean")
    return [*found, embedding]


def copy_of(sequence: Sequence) -> Sequence:
    ids = sequence.token_ids[: sequence.num_prompt_tokens]
    index = sequence.choice_index
    return new_sequence(ids, sequence.sampling, choice_index=index, pooling=sequence.pooling)


class Alone:
    """What sequences give when they are computed alone, one step at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._executor = folder, load(folder)
        self._known: dict[str, StepProgress] = {}

    async def check(self, server: Server, *sequences: Sequence) -> None:
        assert not server.errors
        for each in sequences:
            wanted, ending = await self._ending(each), server.endings[each]
            ids = wanted.sequence.token_ids
            assert server.tokens[each] == ids[wanted.sequence.num_prompt_tokens :]
            if each.pooling is not None:
                assert np.array_equal(ending.embedding, wanted.embedding)

    async def _ending(self, sequence: Sequence) -> StepProgress:
        again = copy_of(sequence)
        key = repr((again.token_ids, again.sampling, again.choice_index))
        if key not in self._known:
            worker = Worker(self._folder, "float32", executor=self._executor)
            await worker.run(again)
            self._known[key] = worker.endings[again.sequence_id]
        return self._known[key]


@pytest.mark.parametrize("most", [40, FLOOR_TOKENS])
async def test_steps_shrink_until_they_fit_and_grow_again(
    alone: Alone,
    executor: CudaExecutor,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
) -> None:
    memory.is_short = lambda phase, num_tokens: phase == "_computed" and num_tokens > most
    async with serving(executor, monkeypatch) as server:
        limit, rows = server.engine.batcher.limit, mixed()
        server.add(*rows)
        await server.ended(*rows)
        load = server.loop.load()
        assert load.max_step_tokens == limit.tokens <= most
        assert 0 < load.num_out_of_memory < 20
        await alone.check(server, *rows)
        memory.is_short = lambda *_: False
        while limit.is_lowered:
            limit.succeeded()
        memory.sizes.clear()
        again = [copy_of(each) for each in rows]
        server.add(*again)
        await server.ended(*again)
        assert max(memory.sizes) == BUDGET
        assert server.loop.load().max_step_tokens == 0


@pytest.mark.parametrize("executor", [1], ids=["late"], indirect=True)
@pytest.mark.parametrize("phase", [*STEP_PHASES, *OTHER_PHASES])
async def test_too_little_memory_in_any_phase_costs_no_row(
    alone: Alone,
    executor: CudaExecutor,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
) -> None:
    """One call of three fails, once the work is done or before it."""
    num_calls = 0

    def is_short(name: str, num_tokens: int) -> bool:
        nonlocal num_calls
        num_calls += name == phase
        memory.is_late = num_calls % 2 == 0
        return name == phase and num_calls % 3 == 1

    memory.is_short = is_short
    async with serving(executor, monkeypatch, zeroes_freed_blocks=True) as server:
        rows = mixed()
        parent = new_sequence(rows[0].token_ids[:-1], None)
        choices = [copy_of(rows[0]) for _ in range(3)]
        for index, each in enumerate(choices):
            each.choice_index = index
            server.engine.accept(each)
        server.children[parent] = choices
        server.add(parent, *rows)
        await server.ended(*rows, *choices)
        again = [copy_of(each) for each in rows]  # in blocks that were freed
        server.add(*again)
        await server.ended(*again)
        memory.is_short = lambda *_: False
        assert memory.num_raised > 0
        assert server.loop.load().num_out_of_memory >= memory.num_raised
        await alone.check(server, *rows, *choices, *again)


async def test_row_that_does_not_fit_alone_fails_and_the_others_go_on(
    alone: Alone,
    executor: CudaExecutor,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often: the device is not lost, and one step is not repeated for ever."""
    computed = executor.computer._computed

    def never(inputs: Any) -> Any:
        if POISON in inputs.input_ids:
            raise out_of_memory()
        return computed(inputs)

    monkeypatch.setattr(executor.computer, "_computed", never)
    async with serving(executor, monkeypatch) as server:
        rows = mixed()
        bad = [new_sequence([POISON, *range(3, 60)], SamplingParams(seed=1, max_tokens=4))]
        bad += [new_sequence([POISON], SamplingParams(seed=1, max_tokens=4)) for _ in range(4)]
        server.add(*rows[:3], *bad, *rows[3:])
        await server.ended(*rows, *bad)
        assert {type(server.errors.pop(each)) for each in bad} == {OutOfMemory}
        await alone.check(server, *rows)


def room_of(seed: int, memory: Memory) -> IsShort:
    """Others take and give memory: the room changes with each step, and is enough for the floor.
    Beside that any phase may fail, not in two steps in a row.
    """
    rng, room, num_calls = random.Random(seed), BUDGET, 0

    def is_short(phase: str, num_tokens: int) -> bool:
        nonlocal room, num_calls
        memory.is_late = rng.random() < 0.3
        if phase == "_computed":
            room = max(FLOOR_TOKENS, min(BUDGET, room + rng.randint(-20, 20)))
            if num_tokens > room:
                return True
        num_calls += 1
        is_short = num_calls > 12 and rng.random() < 0.1
        num_calls = 0 if is_short else num_calls
        return is_short

    return is_short


async def check_random(
    alone: Alone, executor: CudaExecutor, memory: Memory, seed: int, patch: Any
) -> None:
    memory.is_short = room_of(seed, memory)
    async with serving(executor, patch, zeroes_freed_blocks=seed % 2 == 0) as server:
        rows = mixed(seed)
        for each in rows:
            server.add(each)
            await asyncio.sleep(0)
        await server.ended(*rows)
        memory.is_short = lambda *_: False
        await alone.check(server, *rows)


@pytest.mark.parametrize("seed", range(2))
async def test_memory_that_others_take_at_random_costs_no_token(
    alone: Alone,
    executor: CudaExecutor,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    await check_random(alone, executor, memory, seed, monkeypatch)


@pytest.mark.long
async def test_memory_that_others_take_at_random_for_long(
    alone: Alone,
    executor: CudaExecutor,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in range(10, 160):
        await check_random(alone, executor, memory, seed, monkeypatch)


async def test_kv_is_copied_by_layers_where_the_device_has_no_room_for_all(
    opened: list[CudaExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = opened[0]
    line = Blocks(executor.num_blocks).line(list(range(3, 40)))
    prefill(executor, line, 37)
    num_bytes = 37 * executor.kv_layout.bytes_per_token
    wanted, found = bytearray(num_bytes), bytearray(num_bytes)
    run = KvRun(line.block_table, 0, 37)
    await executor.read_kv(run, memoryview(wanted))
    before = executor.num_out_of_memory
    for name in ("read_kv", "write_kv"):
        real = getattr(executor.computer, name)

        def of_one_layer(run: KvRun, memory: memoryview, real: Any = real) -> None:
            if run.shard is None or run.shard.num_layers > 1:
                raise out_of_memory()
            real(run, memory)

        monkeypatch.setattr(executor.computer, name, of_one_layer)
    await executor.read_kv(run, memoryview(found))
    assert found == wanted
    await executor.zero_blocks(list(line.block_table))
    await executor.write_kv(run, memoryview(bytes(wanted)))
    found = bytearray(num_bytes)
    await executor.read_kv(run, memoryview(found))
    assert found == wanted
    assert executor.num_out_of_memory > before


async def test_copy_that_does_not_fit_by_layers_raises(
    opened: list[CudaExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise out_of_memory()

    executor = opened[0]
    monkeypatch.setattr(executor.computer, "read_kv", never)
    with pytest.raises(OutOfMemory, match=r"^CUDA out of memory. Tried to allocate 2.00 GiB.$"):
        await executor.read_kv(
            KvRun((0,), 0, 4), memoryview(bytearray(4 * executor.kv_layout.bytes_per_token))
        )


async def test_graph_that_found_no_memory_is_captured_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "REPLACE_APART_S", 0.0)
    executor = load(folder, Replays(), max_graphs=12)
    graphs = graphs_of(executor)
    graphs.clear()
    captured = graphs._captured
    monkeypatch.setattr(graphs, "_captured", lambda shape: (_ for _ in ()).throw(out_of_memory()))
    worker = Worker(folder, "float32", executor=executor)
    await worker.run(sampled(1, 5, num_tokens=8))
    assert graphs.num_out_of_memory == executor.num_out_of_memory > 1
    assert graphs.num_replayed == 0
    assert not graphs._graphs
    assert not graphs.has_next()  # none in idle moments
    monkeypatch.setattr(graphs, "_captured", captured)
    await worker.run(sampled(3, 5, num_tokens=8))
    assert graphs.num_replayed > 0
    assert executor.step_launch == "graphs"


async def test_cache_goes_back_once_the_failed_step_holds_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, held = FakeDriver(), []
    executor = load(folder, Replays(), driver=driver)

    def failing(inputs: Any) -> Any:
        activations = torch.zeros(4)
        held.append(weakref.ref(activations))
        raise out_of_memory()

    def empty_cache() -> None:
        driver.calls.append(f"{sum(each() is not None for each in held)} held")

    monkeypatch.setattr(executor.computer, "_computed", failing)
    monkeypatch.setattr(driver, "empty_cache", empty_cache)
    with pytest.raises(OutOfMemory):
        await Worker(folder, "float32", executor=executor).run(sampled(1, 5, num_tokens=1))
    assert driver.calls[-2:] == ["synchronize", "0 held"]
    await executor.close()


def test_errors_of_other_allocators_count_too() -> None:
    for text in ("CUDA error: out of memory\nfor", "CUBLAS_STATUS_ALLOC_FAILED when calling"):
        assert is_out_of_memory(RuntimeError(text))
        with pytest.raises(OutOfMemory), telling_of_memory():
            raise RuntimeError(text)
    for other in (
        RuntimeError("CUDA error: an illegal memory access"),
        ValueError("out of memory"),
    ):
        assert not is_out_of_memory(other)
        with pytest.raises(type(other)), telling_of_memory():
            raise other
