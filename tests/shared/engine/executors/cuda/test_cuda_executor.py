"""The CUDA executor without a GPU: tensors are on the CPU, and a fake driver records its calls."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from structlog.testing import capture_logs

from kernels import ops
from kernels.device import IS_INTERPRETED, TritonUnusable
from shared.engine.executors.cuda import cuda_load
from shared.engine.executors.cuda.cuda_device import CudaDevice
from shared.engine.executors.cuda.cuda_executor import CudaExecutor
from shared.engine.executors.cuda.meta_model import META
from shared.engine.executors.group.load_group import load_group
from shared.engine.executors.load import load_executor
from shared.engine.executors.loading.device_limit import LIMITED_KV_SHARE, OUTSIDE_BYTES
from shared.engine.executors.loading.kv_sizing import KV_SHARE, MAX_BLOCKS
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.step_computer import StepComputer
from shared.engine.models.checkpoint_config import read_config
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.planning.vision_tensors import encoder_bytes
from shared.engine.step import KvRun, StepInputs, StepOutput
from shared.errors import ConfigError
from shared.kv_layout import ITEM_BYTES
from tests.shared.engine.executors.cuda.fake_device import INDEX, FakeDriver
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.families import FAMILIES
from tests.support.engine.steps import Blocks, generate, prefill, step_of
from tests.support.engine.vision.vision_models import write_smolvlm

PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


def no_compiler(device: torch.device) -> None:
    raise TritonUnusable("there is no C compiler")


def load(
    model_dir: Path,
    driver: FakeDriver,
    try_kernel: Callable[[torch.device], None] = lambda _: None,
    **options: object,
) -> CudaExecutor:
    device = CudaDevice(INDEX, torch.device("cpu"), driver, try_kernel)
    given = {"dtype": "float32", "max_batch_tokens": 64, "max_sequences": 4} | options
    given.setdefault("parked_weights", "device")  # compiled loops hold addresses of packed weights
    chosen = LoadOptions(**given)  # type: ignore[arg-type]
    return CudaExecutor.load(model_dir, chosen, device)


def test_kv_cache_takes_nine_tenths_of_free_memory(
    model_dir: Path,
) -> None:
    driver = FakeDriver(free=lambda: 3 << 20)
    executor = load(model_dir, driver)
    block_bytes = 16 * executor.kv_layout.bytes_per_token
    assert executor.num_blocks == int((3 << 20) * KV_SHARE) // block_bytes
    assert executor.max_context_tokens == min(2048, executor.num_blocks * 16)
    # unused memory is released first; free memory is measured after all launched work has ended
    assert driver.calls == ["synchronize", "empty_cache", "synchronize", "mem_get_info"]


async def test_parked_device_reads_no_block(model_dir: Path) -> None:
    """There is none, and its weights may have stayed on the device."""
    executor = load(model_dir, FakeDriver(free=lambda: 3 << 20))
    steps: list[StepInputs] = []
    executor.computer.launch = steps.append  # type: ignore[method-assign,assignment]
    await executor.resize_kv(0)
    await executor.check()
    assert not steps
    await executor.close()


def test_pinned_memory_is_released_with_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """After all copies have ended, in whose time torch would retain it."""
    driver = FakeDriver()
    empty = partial(driver.calls.append, "empty_pinned")
    monkeypatch.setattr(torch._C, "_host_emptyCache", empty, raising=False)
    CudaDevice(INDEX, torch.device("cuda", INDEX), driver).release_cached()
    assert driver.calls == ["synchronize", "empty_cache", "empty_pinned"]


def test_start_runs_one_step(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest: all rows sample, and the last is a prompt of the other tokens."""
    steps: list[StepInputs] = []
    run = StepComputer.run

    def recorded(self: StepComputer, inputs: StepInputs) -> StepOutput:
        steps.append(inputs)
        return run(self, inputs)

    monkeypatch.setattr(StepComputer, "run", recorded)
    load(model_dir, FakeDriver())
    (step,) = steps
    assert step.query_lens.tolist() == [1, 1, 1, 61]
    assert step.context_lens.min() > 1000
    assert step.sampling.num_rows == 4


def test_stages_of_a_load_are_told(model_dir: Path) -> None:
    """In their order. Those of graphs and of the library's kernels do not run on a CPU."""
    with capture_logs() as logs:
        executor = load(model_dir, FakeDriver(), lambda _: time.sleep(0.01))
    (told,) = [each for each in logs if each["event"] == "loaded"]
    assert {name: each for name, each in told.items() if name.endswith("_s")} == (
        executor.load_stages
    )
    stages = list(executor.load_stages)
    assert executor.load_stages["device_s"] >= 0.01
    assert stages.index("device_s") < stages.index("weights_s") < stages.index("first_step_s")
    assert "graphs_s" not in stages


def test_weights_are_compressed_as_they_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of experts and norms are on the device at once."""
    monkeypatch.setattr(cuda_load, "run_largest_step", lambda *_: None)  # compiles CPU kernels
    FAMILIES["llama4, experts"].write(tmp_path, hidden_size=96)
    dense, found = (
        load(tmp_path, FakeDriver(), dtype="bfloat16", weights=weights, kv_cache_bytes=1 << 22)
        for weights in ("dense", "compressed")
    )
    assert dense.revision == found.revision
    assert found.weights.num_compressed > 0 == dense.weights.num_compressed
    model = found.computer.model
    assert not any(each.is_meta for each in (*model.parameters(), *model.buffers()))


@pytest.mark.skipif(IS_INTERPRETED, reason="the fake driver is not the interpreter's")
def test_split_products_are_measured_before_memory_is(tmp_path: Path) -> None:
    """In memory that is released before the step whose memory counts."""
    pytest.importorskip("triton")
    from tests.support.kernels.triton_ops import triton_ops

    fields = {"vocab_size": 512, "hidden_size": 128, "head_dim": 32, "intermediate_size": 640}
    write_llama(tmp_path, num_hidden_layers=1, **fields)
    driver = FakeDriver()

    def measured(shape: tuple[int, int], on: torch.device, *_: object) -> int:
        if on.type != "meta":
            driver.calls.append(str(shape))
        return 64

    with triton_ops(), patch.object(ops, "fused_rows", measured):
        load(tmp_path, driver, dtype="bfloat16", weights="compressed", kv_cache_bytes=1 << 22)
    first = driver.calls.index("empty_cache")
    before, after = set(driver.calls[:first]), set(driver.calls[first + 1 :])
    assert str((512, 128)) in after
    assert after <= before


def test_kv_cache_leaves_room_for_the_encoder_of_images(tmp_path: Path) -> None:
    """The worker loads it after its model, on the same device."""
    write_smolvlm(tmp_path)
    num_bytes = encoder_bytes(read_config(tmp_path).vision, ITEM_BYTES["float32"])
    free = num_bytes + (1 << 20)
    executor = load(tmp_path, FakeDriver(free=lambda: free))
    block_bytes = 16 * executor.kv_layout.bytes_per_token
    assert executor.num_blocks == int((1 << 20) * KV_SHARE) // block_bytes
    limit = f"{OUTSIDE_BYTES + free}B"
    limited = load(tmp_path, FakeDriver(free=lambda: 0), gpu_memory=limit)
    assert limited.num_blocks == int((1 << 20) * LIMITED_KV_SHARE) // block_bytes


def test_given_kv_cache_size_is_used_without_measuring(model_dir: Path) -> None:
    driver = FakeDriver()
    executor = load(model_dir, driver, kv_cache_bytes=1 << 19)
    assert executor.num_blocks == (1 << 19) // (16 * executor.kv_layout.bytes_per_token)
    assert "mem_get_info" not in driver.calls


def limited(model_dir: Path, driver: FakeDriver, **options: object) -> CudaExecutor:
    driver.total, driver.reserved = 4 << 30, 1 << 30
    return load(model_dir, driver, gpu_memory="50%", **options)


def test_workers_that_start_at_once_on_one_device_get_what_their_limits_leave(
    model_dir: Path,
) -> None:
    """Whatever the other one holds when this one measures. torch keeps to the limit, too."""
    found = []
    for free in (3 << 30, 1 << 20, 0):
        driver = FakeDriver(free=lambda free=free: free)  # type: ignore[misc]
        found.append(limited(model_dir, driver).num_blocks)
        assert driver.fractions == [((2 << 30) - OUTSIDE_BYTES) / (4 << 30)]
    block_bytes = 16 * load(model_dir, FakeDriver()).kv_layout.bytes_per_token
    left = (2 << 30) - OUTSIDE_BYTES - (1 << 30)
    assert found == [min(MAX_BLOCKS, int(left * LIMITED_KV_SHARE) // block_bytes)] * 3


def test_worker_without_a_limit_sets_none(model_dir: Path) -> None:
    driver = FakeDriver()
    load(model_dir, driver)
    assert not driver.fractions


def test_given_kv_cache_must_fit_the_limit(model_dir: Path) -> None:
    assert limited(model_dir, FakeDriver(), kv_cache_bytes=1 << 19).num_blocks > 0
    with pytest.raises(ConfigError, match=r"kv_cache_bytes 400 MiB. Use a smaller --kv-cache-b"):
        limited(model_dir, FakeDriver(), kv_cache_bytes=400 << 20)


def test_limit_is_enough_for_a_start_in_standby(model_dir: Path) -> None:
    executor = limited(model_dir, FakeDriver(), is_parked=True)
    assert executor.num_blocks == limited(model_dir, FakeDriver()).num_blocks
    assert executor.computer.kv_cache.shape[2] == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty_model", r"is \d+ MiB too small: the model takes 1 MiB beside the 1024 MiB that"),
        ("run_largest_step", r"too small: the next part of a start takes 2048 MiB beside"),
        ("allocate_kv_cache", r"^the KV cache takes \d+ MiB, and 1 MiB of 4096 MiB of device mem"),
    ],
)
def test_start_without_memory_is_an_error_of_one_line(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    """Weights are counted without the device. Others than this worker may hold the memory."""
    real = getattr(cuda_load, name)

    def failing(*arguments: Any, **options: Any) -> Any:
        is_first_cache = name == "allocate_kv_cache" and arguments[1] == 1
        if options.get("weights_on") == META or is_first_cache:
            return real(*arguments, **options)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    monkeypatch.setattr(cuda_load, name, failing)
    driver = FakeDriver(total=4 << 30, reserved=1 << 30)
    limit = "1724MiB" if name == "empty_model" else "50%"
    with pytest.raises(ConfigError, match=message) as raised:
        load(model_dir, driver, gpu_memory=limit)
    assert "\n" not in raised.value.message


def test_limit_is_for_cuda_devices(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="gpu_memory 45% is for CUDA devices, and the device is"):
        load_executor(model_dir, gpu_memory="45%")
    with pytest.raises(ConfigError, match="gpu_memory 45% is for CUDA devices, and the device is"):
        load_group(model_dir, "cpu", MeshShape(1, 1), gpu_memory="45%")


def test_device_without_room_raises_config_error(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="no room for KV"):
        load(model_dir, FakeDriver(free=lambda: 100))


def test_missing_compiler_raises_config_error_before_loading() -> None:
    with pytest.raises(ConfigError, match="no C compiler"):
        load(Path("/there/is/no/model"), FakeDriver(), no_compiler)


async def test_parked_executor_releases_its_cache_and_allocates_another_size(
    model_dir: Path,
) -> None:
    driver = FakeDriver()
    executor = load(model_dir, driver, kv_cache_bytes=1 << 19, kv_ceiling_bytes=1 << 20)
    assert (executor.max_blocks, executor.is_elastic) == (2 * executor.num_blocks, False)
    driver.calls.clear()
    cache = weakref.ref(executor.computer.kv_cache.untyped_storage())
    await executor.resize_kv(0)
    assert executor.computer.kv_cache.shape[2] == 0
    assert cache() is None, "something holds the cache"
    assert driver.calls == ["synchronize", "empty_cache"]
    await executor.resize_kv(executor.max_blocks)
    assert executor.computer.kv_cache.shape[2] == executor.max_blocks
    line = Blocks(executor.max_blocks).line(PROMPT)
    await executor.run(step_of([(line, len(PROMPT))]))
    await executor.close()


async def test_executor_that_starts_parked_has_no_cache_until_it_gets_one(model_dir: Path) -> None:
    executor = load(model_dir, FakeDriver(), kv_cache_bytes=1 << 19, is_parked=True)
    assert executor.computer.kv_cache.shape[2] == 0
    assert executor.num_blocks == (1 << 19) // executor.kv_layout.block_bytes
    await executor.resize_kv(executor.num_blocks)
    assert executor.computer.kv_cache.shape[2] == executor.num_blocks
    await executor.close()


def test_start_in_standby_needs_a_size_of_the_cache(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="starts parked needs kv_cache_bytes or gpu_memory"):
        load(model_dir, FakeDriver(), is_parked=True)


async def test_every_thread_that_uses_the_device_is_bound_to_it(model_dir: Path) -> None:
    driver = FakeDriver()
    executor = load(model_dir, driver)
    line = Blocks(executor.num_blocks).line(PROMPT)
    await executor.run(step_of([(line, len(PROMPT))]))
    wire = bytearray(16 * executor.kv_layout.bytes_per_token)
    await executor.read_kv(KvRun(line.block_table, 0, 16), memoryview(wire))
    await executor.write_kv(KvRun(line.block_table, 0, 16), memoryview(wire))
    await executor.zero_blocks(line.block_table)
    await executor.close()
    assert set(driver.bound.values()) == {INDEX}
    workers = {name.rpartition("_")[0] for name in driver.bound}
    assert {"engine-step", "engine-copy"} <= workers


async def test_launch_from_a_thread_on_another_device_raises(model_dir: Path) -> None:
    executor = load(model_dir, FakeDriver())
    line = Blocks(executor.num_blocks).line(PROMPT)
    wire = memoryview(bytearray(16 * executor.kv_layout.bytes_per_token))
    computer = executor.computer
    with ThreadPoolExecutor(1, "stray") as stray:
        for launch in (
            lambda: computer.run(step_of([(line, len(PROMPT))])),
            lambda: computer.read_kv(KvRun(line.block_table, 0, 16), wire),
            lambda: computer.write_kv(KvRun(line.block_table, 0, 16), wire),
            lambda: computer.zero_blocks(line.block_table),
        ):
            with pytest.raises(RuntimeError, match=r"'stray_0' is on cuda:0, .* on cuda:3"):
                await asyncio.wrap_future(stray.submit(launch))
    await executor.close()


def test_tokens_and_revision_equal_those_of_load_executor(model_dir: Path) -> None:
    assert_equal_to_load_executor(model_dir)


def test_latents_are_served_like_keys_and_values(tmp_path: Path) -> None:
    """Steps compile kernels before the expansion of latents is packed."""
    FAMILIES["deepseek"].write(tmp_path)
    assert_equal_to_load_executor(tmp_path, dtype="bfloat16")


def assert_equal_to_load_executor(model_dir: Path, dtype: str = "float32") -> None:
    found = load(model_dir, FakeDriver(), dtype=dtype)
    expected = load_executor(model_dir, dtype=dtype, kv_cache_bytes=1 << 20)
    assert found.revision == expected.revision
    new = [
        generate(each, Blocks(each.num_blocks).line(PROMPT, room=8), 8)
        for each in (found, expected)
    ]
    assert new[0] == new[1]
    lines = [Blocks(each.num_blocks).line(PROMPT) for each in (found, expected)]
    assert torch.equal(prefill(found, lines[0], 16), prefill(expected, lines[1], 16))
