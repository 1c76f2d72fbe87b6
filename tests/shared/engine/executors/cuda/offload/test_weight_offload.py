"""Parked workers on CUDA without their weights, on CPU tensors in the forms that a device has."""

from __future__ import annotations

import asyncio
import gc
import random
import re
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from operator import eq
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor, nn

from shared.engine.executors.cuda import cuda_executor, cuda_load
from shared.engine.executors.cuda.cuda_device import CudaDevice
from shared.engine.executors.cuda.cuda_executor import CudaExecutor
from shared.engine.executors.cuda.graph_computer import GraphComputer
from shared.engine.executors.cuda.offload import weight_offload
from shared.engine.executors.cuda.offload.host_memory import HostMemory
from shared.engine.executors.cuda.offload.weight_offload import WeightOffload
from shared.engine.models.device_step import DeviceStepOutput
from shared.engine.step import KvRun
from shared.errors import NoCapacity
from shared.messages import SamplingParams
from tests.shared.engine.executors.cuda.fake_device import INDEX, FakeDriver, Replays, load
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.device_forms import use_device_forms
from tests.support.engine.families import FAMILIES
from tests.support.engine.model_worker import Worker
from tests.support.engine.quantized import quantize
from tests.support.engine.rig import new_sequence

PIECE_BYTES = 4096
FORMS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2, no caps, biases, tied": {},
    "llama4, experts": {},
    "deepseek": {},
    "int4": {"dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16", "kv_dtype": "fp8"},
    "split": {"dtype": "bfloat16", "weights": "compressed"},
}


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's memory is in many pieces, and what the device frees is taken by others."""
    use_device_forms(monkeypatch)
    monkeypatch.setattr(cuda_load, "run_largest_step", lambda *_: None)
    pieces = partial(HostMemory, piece_bytes=PIECE_BYTES)
    monkeypatch.setattr(weight_offload, "HostMemory", pieces)
    other = OtherMemory(torch.UntypedStorage.resize_)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", lambda *each: other.resize(*each))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


def write(form: str, folder: Path) -> Path:
    if form in FAMILIES:
        FAMILIES[form].write(folder)
        return folder
    plain = folder / "plain"
    write_llama(plain, hidden_size=64, head_dim=32, intermediate_size=128)
    return quantize(plain, folder / form, form) if form in ("int4", "fp8") else plain


class OtherMemory:
    """Weights come back to other addresses: what they left is taken by others."""

    def __init__(self, resize: Callable[..., Any]) -> None:
        self._resize = resize
        self._left = dict[int, int]()  # storage -> the address that it left
        self._others: list[Tensor] = []

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        if not size:
            self._left[storage._cdata] = storage.data_ptr()
        self._resize(storage, size)
        while size and storage.data_ptr() == self._left.get(storage._cdata):
            self._resize(storage, 0)
            self._others.append(torch.empty(size, dtype=torch.uint8))
            self._resize(storage, size)


class AddressedReplays(Replays):
    """Graphs hold the addresses of weights and cache."""

    def capture(
        self, call: partial[DeviceStepOutput]
    ) -> tuple[Callable[[], None], DeviceStepOutput]:
        replay, output = super().capture(call)
        computer: GraphComputer = call.func.__self__  # type: ignore[attr-defined]
        captured = addresses(computer)

        def checked() -> None:
            assert addresses(computer) == captured, "a graph has old addresses"
            replay()

        return checked, output


def on_device(computer: GraphComputer) -> list[Tensor]:
    return [computer.kv_cache, *computer.model.parameters()]


def addresses(computer: GraphComputer) -> list[int]:
    return [each.data_ptr() for each in on_device(computer)]


def freed_addresses(computer: GraphComputer) -> list[int]:
    """Returns those of weights. What the compiled loops of CPUs have as arrays stays there."""
    found = tensors_reachable(computer.model)
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in found}
    for each in computer.expert_sums():
        storages.pop(each.untyped_storage()._cdata, None)
    return [each.data_ptr() for each in storages.values() if each.nbytes() and each.resizable()]


def load_parkable(folder: Path, graphs: Replays | None = None, **options: Any) -> CudaExecutor:
    options = {"parked_weights": "host", "kv_cache_bytes": 1 << 19} | options
    executor = load(folder, **options)
    executor.computer.use_graphs(graphs or AddressedReplays(), max_rows=8, max_graphs=64)
    return executor


async def tokens_of(executor: CudaExecutor, folder: Path, seed: int = 3) -> list[int]:
    """Returns drawn and greedy tokens of prompts in one batch."""
    worker = Worker(folder, "", executor=executor)
    prompts = [[(11 * n + k + seed) % 190 + 3 for n in range(20 + 9 * k)] for k in range(2)]
    sampled = [
        SamplingParams(seed=seed, max_tokens=6, temperature=temperature)
        for temperature in (0.0, 0.9)
    ]
    sequences = [new_sequence(*each) for each in zip(prompts, sampled, strict=True)]
    await worker.run(*sequences)
    return [token for each in sequences for token in worker.tokens[each.sequence_id]]


CONTAINERS = (dict, list, tuple, set, frozenset, deque, partial, MethodType)
OF_ENGINE = ("shared", "kernels", "torch")


def tensors_reachable(root: object) -> Iterator[Tensor]:
    """Found by the interpreter, not by the code under test: in containers, closures, and objects of
    the engine.
    """
    left, seen = [root], dict[int, object]()
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, type):
            continue
        seen[id(each)] = each
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, FunctionType):
            left += [cell.cell_contents for cell in each.__closure__ or ()]
        elif isinstance(each, CONTAINERS) or type(each).__module__.startswith(OF_ENGINE):
            left += gc.get_referents(each)


def bytes_on_device(executor: CudaExecutor) -> int:
    """Besides counters of experts and the last tokens, which steps write, and what the compiled
    loops of CPUs have as arrays: torch does not free that.
    """
    computer = executor.computer
    tensors = [each for each in tensors_reachable(computer) if not each.is_meta]
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
    for each in (*computer.expert_sums(), computer.last_tokens):
        assert each is not None
        storages.pop(each.untyped_storage()._cdata)
    return sum(each.nbytes() for each in storages.values() if each.resizable())


@pytest.mark.parametrize("form", FORMS)
async def test_woken_weights_give_the_same_tokens_from_other_addresses(
    form: str, tmp_path: Path
) -> None:
    folder = write(form, tmp_path)
    executor = load_parkable(folder, **FORMS[form])
    if form == "split":
        assert executor.weights.num_compressed > 0
    expected = await tokens_of(executor, folder)
    counts = await executor.expert_counts()
    for num_blocks in (executor.num_blocks, executor.num_blocks // 2):
        before = freed_addresses(executor.computer)
        assert before
        await executor.resize_kv(0)
        assert bytes_on_device(executor) == 0
        assert executor.offloaded_bytes > 0
        await executor.check()
        parked = await executor.expert_counts()
        assert parked is None or (counts is not None and (parked >= counts).all())
        await executor.resize_kv(num_blocks)
        assert not any(map(eq, before, freed_addresses(executor.computer)))
        assert executor.offloaded_bytes == 0
        assert await tokens_of(executor, folder) == expected
    await executor.close()


async def test_graphs_are_captured_by_the_first_steps_after_a_wake(llama: Path) -> None:
    executor = load_parkable(llama)
    await tokens_of(executor, llama)
    graphs = executor.computer.graphs
    assert graphs is not None
    await executor.resize_kv(0)
    await executor.resize_kv(executor.num_blocks)
    num_eager = graphs.num_eager
    await tokens_of(executor, llama)
    assert graphs.num_eager == num_eager
    await executor.close()


async def test_graphs_are_captured_after_a_wake_without_steps(llama: Path) -> None:
    device = AddressedReplays()
    executor = load_parkable(llama, device)
    executor._captures._idle_s = 0.0
    await executor.resize_kv(0)
    device.rows.clear()
    await executor.resize_kv(executor.num_blocks)
    await executor._captures._background.idle()
    assert device.rows[:4] == [1, 1, 2, 2]
    await executor.close()


async def test_executor_that_starts_parked_holds_no_weights_until_it_is_woken(llama: Path) -> None:
    expected = await tokens_of(load_parkable(llama), llama)
    executor = load_parkable(llama, is_parked=True)
    assert executor.offloaded_bytes > 0
    assert bytes_on_device(executor) == 0
    await executor.resize_kv(executor.num_blocks)
    assert await tokens_of(executor, llama) == expected
    assert executor.computer.graphs is not None
    assert executor.computer.graphs.num_eager == 0
    await executor.close()


def keeps_graphs(_: GraphComputer) -> None: ...


def copies_nothing(_: WeightOffload) -> Iterator[tuple[Tensor, Tensor]]:
    return iter(())


PLANTED: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "graphs are kept": (GraphComputer, "forget_graphs", keeps_graphs),
    "weights are not copied": (WeightOffload, "_copies", copies_nothing),
}


@pytest.mark.parametrize("fault", PLANTED)
async def test_planted_fault_is_found(
    llama: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = load_parkable(llama)
    expected = await tokens_of(executor, llama)
    owner, name, planted = PLANTED[fault]
    monkeypatch.setattr(owner, name, planted)
    await executor.resize_kv(0)
    await executor.resize_kv(executor.num_blocks)
    with pytest.raises(AssertionError):
        assert await tokens_of(executor, llama) == expected


# ── too little memory ────────────────────────────────────────────────────────────────────────────


def fail_at(call: Callable[..., Any], number: int, error: Exception) -> Callable[..., Any]:
    """Returns a function that raises at its call `number`."""
    numbers = iter(range(number + 1))

    def called(*arguments: Any) -> Any:
        if next(numbers, None) == number:
            raise error
        return call(*arguments)

    return called


@pytest.mark.parametrize("taken", ["first weight", "fifth weight", "cache", "copy", "driver"])
async def test_wake_that_fails_leaves_the_executor_parked(
    llama: Path, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = "1GiB" if taken == "cache" else ""
    executor = load_parkable(llama, gpu_memory=limit)
    expected = await tokens_of(executor, llama)
    await executor.resize_kv(0)
    offloaded, none_left = executor.offloaded_bytes, torch.OutOfMemoryError("CUDA out of memory")
    with monkeypatch.context() as patched:
        if taken == "cache":
            allocate = fail_at(cuda_executor.allocate_kv_cache, 1, none_left)
            patched.setattr(cuda_executor, "allocate_kv_cache", allocate)
        elif taken in ("copy", "driver"):
            reason = {"copy": "an illegal access", "driver": "CUDA error: out of memory"}[taken]
            copied = fail_at(weight_offload.bytes_of, 3, RuntimeError(reason))
            patched.setattr(weight_offload, "bytes_of", copied)
        else:
            number = {"first weight": 0, "fifth weight": 4}[taken]
            resize = fail_at(torch.UntypedStorage.resize_, number, none_left)
            patched.setattr(torch.UntypedStorage, "resize_", lambda *each: resize(*each))
        expected_error = RuntimeError if taken == "copy" else NoCapacity
        with pytest.raises(expected_error) as raised:
            await executor.resize_kv(executor.num_blocks)
    if taken != "copy":
        weights, kv = (f"{each >> 20} MiB" for each in (offloaded, 1 << 19))
        assert f"{weights} of weights and {kv} of KV do not fit" in str(raised.value)
        assert ("gpu_memory 1GiB" in str(raised.value)) == bool(limit)
    assert executor.offloaded_bytes == offloaded
    assert bytes_on_device(executor) == 0
    await executor.resize_kv(executor.num_blocks)
    assert await tokens_of(executor, llama) == expected
    await executor.close()


async def test_weights_stay_where_the_host_has_too_little_memory(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_offload, "available_bytes", lambda: 1 << 20)
    executor = load_parkable(llama)
    expected = await tokens_of(executor, llama)
    with capture_logs() as logs:
        await executor.resize_kv(0)
    (line,) = [each for each in logs if each["event"] == "weights_stay_on_device"]
    assert (line["available_bytes"], line["log_level"]) == (1 << 20, "warning")
    assert executor.offloaded_bytes == 0
    await executor.resize_kv(executor.num_blocks)
    assert await tokens_of(executor, llama) == expected
    await executor.close()


def test_pieces_after_one_that_cannot_be_locked_are_pageable() -> None:
    locked: list[int] = []

    def lock(piece: memoryview) -> Callable[[], None] | None:
        locked.append(len(piece))
        return None if len(locked) == 2 else partial(locked.remove, len(piece))

    memory = HostMemory(3 * PIECE_BYTES + 5, lock, piece_bytes=PIECE_BYTES)
    assert [len(each) for each in memory.pieces] == [*[PIECE_BYTES] * 3, 5]
    assert locked == [PIECE_BYTES] * 2
    assert not memory.is_locked
    memory.close()
    assert len(locked) == 1


def test_first_park_takes_the_memory_of_the_weights_alone() -> None:
    park(1 << 10)  # the first copy of a process starts threads and loads code
    before = reset_peak_bytes()
    assert park(1 << 22) == 64 << 20
    assert peak_bytes() - before < (152 << 20)  # the weights, their copy, and less than another


def park(num_values: int) -> int:
    """Parks four weights of so many values. Returns the bytes in the host's memory."""
    model = nn.Module()
    for index in range(4):
        each = nn.Parameter(torch.ones(num_values), requires_grad=False)
        model.register_parameter(f"weight_{index}", each)
    device = CudaDevice(INDEX, torch.device("cpu"), FakeDriver())
    offload = WeightOffload(model, [], device, lambda _: None)
    offload.offload()
    num_bytes = offload.offloaded_bytes
    offload.close()
    return num_bytes


def reset_peak_bytes() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


# ── random sequences ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_parks_wakes_steps_and_copies(llama: Path, seed: int) -> None:
    executor, chance = load_parkable(llama), random.Random(seed)
    executor._captures._idle_s = 0.0
    expected = {each: await tokens_of(executor, llama, each) for each in range(3)}
    num_blocks = executor.num_blocks
    for _ in range(14):
        choice = chance.choice(["park", "wake", "steps", "steps", "copies"])
        if choice == "park":
            num_blocks = 0
            await executor.resize_kv(0)
            assert bytes_on_device(executor) == 0
        elif choice == "wake":
            num_blocks = executor.num_blocks - chance.randrange(4)
            await executor.resize_kv(num_blocks)
        elif num_blocks and choice == "steps":
            which = chance.randrange(3)
            assert await tokens_of(executor, llama, which) == expected[which]
        elif num_blocks:
            await check_copies(executor, chance.randrange(num_blocks - 2))
    await executor.close()


async def check_copies(executor: CudaExecutor, first: int) -> None:
    """Pushes KV out of the cache and back, several at a time."""
    run = KvRun([first, first + 1], 0, 20)
    num_bytes = 20 * executor.kv_layout.group_bytes_per_token(0)
    sent = memoryview(bytes(range(1, 251)) * (num_bytes // 250 + 1))[:num_bytes]
    await executor.write_kv(run, sent)
    outs = [memoryview(bytearray(num_bytes)) for _ in range(3)]
    await asyncio.gather(*(executor.read_kv(run, each) for each in outs))
    assert all(each == sent for each in outs)
