"""The kernels that a worker needs are a closed set, compiled before it is ready."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from kernels.device import IS_INTERPRETED

pytest.importorskip("triton")
if IS_INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
import triton.language as tl

from kernels.compile_on_meta import compiling_on_meta
from kernels.split_weight import SplitWeight
from shared.engine.executors.cuda.compile_kernels import StepKernels, compile_kernels
from shared.engine.executors.cuda.first_step import run_largest_step
from shared.engine.executors.loading.kv_scales import set_kv_scales
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.loading.model_loading import (
    finish_model,
    kv_layout_of,
)
from shared.engine.executors.loading.warm_up import AllTokens, idle_step
from shared.engine.executors.step_computer import StepComputer
from shared.engine.kv.kv_cache import allocate_kv_cache
from shared.engine.models.checkpoint_config import read_config
from shared.engine.models.decoder import Decoder
from shared.engine.step import KvRun, Penalties, PromptSuccessors, StepInputs, TokenMasks
from shared.engine.weights.load import open_checkpoint
from shared.engine.weights.shared_weights import compress_weights
from shared.kv_layout import FP8
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.families import FAMILIES
from tests.support.engine.quantized import quantize
from tests.support.grids import in_short_run
from tests.support.kernels.fake_driver import FakeDriver
from tests.support.kernels.triton_ops import triton_ops

OPTIONS = LoadOptions(max_batch_tokens=512, max_sequences=256)
FEW = LoadOptions(max_batch_tokens=128, max_sequences=16)  # fewer keys to compile
CHUNKS = (2, 3, 7, 16, 17, 63, 64, 65, 100, 128, 129, 255, 256, 257, 384, 511, 512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    fields = {"vocab_size": 512, "hidden_size": 64, "head_dim": 16, "intermediate_size": 640}
    write_llama(folder, num_hidden_layers=1, **fields)
    return folder


def computer_of(folder: Path, kv_dtype: str = "bfloat16", block_size: int = 16) -> StepComputer:
    config = read_config(folder)
    kv_layout = kv_layout_of(config, kv_dtype, block_size)
    model = Decoder(config, dtype=torch.bfloat16, num_positions=4096).eval()
    if kv_dtype == FP8:
        set_kv_scales(model, torch.ones(config.num_layers, 2, config.num_kv_heads))
    return StepComputer(model, allocate_kv_cache(kv_layout, 64, torch.device("cpu")), kv_layout)


@pytest.fixture(scope="module")
def computer(folder: Path) -> StepComputer:
    return computer_of(folder, "bfloat16")


@pytest.fixture(scope="module")
def fake(computer: StepComputer) -> Iterator[FakeDriver]:
    """A driver on which the computer is warm."""
    with triton_ops() as driver:
        finish_model(computer.model, OPTIONS.mode, is_compressed=False)
        warm_up(computer, driver)
        yield driver


def warm_up(computer: StepComputer, driver: FakeDriver, options: LoadOptions = OPTIONS) -> None:
    """As a worker's start does: compiles by key, runs one step."""
    num_blocks = computer.kv_cache.shape[2]
    compile_kernels(StepKernels(computer.model, computer.kv_layout, num_blocks, options))
    names = {each.name for each in driver.compiled}
    assert "_decode_attention_kernel" in names
    assert driver.num_launches == 0
    run_largest_step(computer, options)
    driver.compiled.clear()


SHORT = {("gemma2", False), ("gemma2", True), ("deepseek", False), ("qwen3 moe", True)}
CASES = product(("gemma2", "llama4", "deepseek", "qwen3 moe"), (False, True))


@pytest.mark.parametrize(("family", "is_quantized"), in_short_run(SHORT, CASES))
def test_each_family_is_compiled_by_key(
    family: str, is_quantized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of layers have inputs of their own, at odd places of one array. Nothing is computed,
    so routers choose at random.
    """
    monkeypatch.setattr(StepComputer, "_check_routing", lambda *_: None)
    FAMILIES[family].write(tmp_path / "model")
    folder = tmp_path / "model"
    if is_quantized:
        folder = quantize(folder, tmp_path / "quantized", "fp8")
    computer = computer_of(folder, block_size=64)
    with triton_ops() as driver:
        finish_model(computer.model, OPTIONS.mode, is_compressed=False)
        if is_quantized and computer.model.config.has_experts:  # whose steps need real choices
            compile_kernels(StepKernels(computer.model, computer.kv_layout, 64, FEW))
            assert "_grouped_kernel" in {each.name for each in driver.compiled}
            return
        warm_up(computer, driver, FEW)
        resize(computer, 2**22)  # strides beyond 2^31
        assert Counter(each.name for each in driver.compiled) == {}
        groups = len(computer.kv_layout.groups)
        for query_lens in ([1, 1, 1], [65], [1, 1, 7]):
            for context in (0, 700):
                step = idle_step(64, query_lens, context_tokens=context, num_groups=groups)
                computer.run(step)
        assert Counter(each.name for each in driver.compiled) == {}


def test_compressed_weights_are_compiled_by_key(tmp_path: Path) -> None:
    fields = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 640, "vocab_size": 512}
    write_llama(tmp_path, num_hidden_layers=1, **fields)
    computer = computer_of(tmp_path, block_size=16)
    model = computer.model
    with triton_ops() as driver, open_checkpoint(tmp_path) as tensors:
        compress_weights(model, model.weight_destinations(), tensors)
        assert isinstance(model.lm_head.weight, SplitWeight)
        finish_model(model, OPTIONS.mode, is_compressed=True)
        warm_up(computer, driver)
        for step in all_chunks():
            computer.run(step)
        assert Counter(each.name for each in driver.compiled) == {}


def resize(computer: StepComputer, num_blocks: int) -> None:
    compile_kernels(StepKernels(computer.model, computer.kv_layout, num_blocks, FEW))


def sampled(step: StepInputs, **fields: object) -> StepInputs:
    return msgspec.structs.replace(step, sampling=msgspec.structs.replace(step.sampling, **fields))


def all_batches() -> Iterator[StepInputs]:
    rng = random.Random(1)
    for num_rows in range(1, 257):
        context = rng.choice((0, 0, 500, 513, 3000))
        temperature = rng.choice((0.0, 0.8))
        rows = [1] * num_rows
        yield idle_step(16, rows, temperature=temperature, context_tokens=context)


def all_chunks() -> Iterator[StepInputs]:
    for chunk in CHUNKS:
        for context in (0, 513):
            yield idle_step(16, [chunk], context_tokens=context)
            others = [1] * min(3, 512 - chunk)
            yield idle_step(16, [*others, chunk], context_tokens=context)


def all_samplers() -> Iterator[StepInputs]:
    for num_rows in (1, 2, 16, 33):
        step = idle_step(16, [1] * num_rows, temperature=1.0)
        for count in (1, 2, 16, 300):
            entries = np.zeros(count, dtype=np.int64)
            values = np.ones(count, dtype=np.float32)
            yield sampled(step, penalties=Penalties(entries, entries, values, values))
        for num_top in (0, 1, 2, 5, 8, 16, 20):
            yield sampled(step, raw_logprobs={0: num_top})
            yield sampled(step, processed_logprobs=dict.fromkeys(range(num_rows), num_top))
        for count in (1, num_rows):
            all_tokens = (AllTokens(512),) * count
            masks = TokenMasks(np.arange(count), all_tokens)
            yield sampled(step, banned=[(0, 5)], masks=masks)
        yield sampled(step, banned=[(0, 5)])
    prompt = idle_step(16, [40])
    for count, num_top in ((1, 0), (15, 3), (39, 20)):
        successors = PromptSuccessors(np.zeros(count, dtype=np.int64), num_top)
        yield msgspec.structs.replace(prompt, prompt_logprobs={0: successors})
    for num_copies in (1, 2, 3, 8, 9, 64, 65, 200):
        yield msgspec.structs.replace(prompt, block_copies=((0, 1),) * num_copies)


@pytest.mark.parametrize("steps", [all_batches, all_chunks, all_samplers])
def test_warm_worker_compiles_nothing(computer: StepComputer, fake: FakeDriver, steps) -> None:  # type: ignore[no-untyped-def]
    fake.compiled.clear()
    num_launches = fake.num_launches
    for step in steps():
        computer.run(step)
    assert fake.num_launches > num_launches
    assert Counter(each.name for each in fake.compiled) == {}


@pytest.mark.parametrize("family", ["llama, yarn", "deepseek"])
def test_warm_worker_with_an_fp8_cache_compiles_nothing(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepComputer, "_check_routing", lambda *_: None)
    FAMILIES[family].write(tmp_path)
    computer = computer_of(tmp_path, FP8)
    with triton_ops() as driver:
        finish_model(computer.model, OPTIONS.mode, is_compressed=False)
        warm_up(computer, driver, FEW)
        for rows in ([1], [1] * 4, [32], [1, 1, 7]):
            for context in (0, 513):
                computer.run(idle_step(16, rows, context_tokens=context))
        computer.zero_blocks([0])
        assert Counter(each.name for each in driver.compiled) == {}


def test_pushes_of_a_warm_worker_compile_nothing(computer: StepComputer, fake: FakeDriver) -> None:
    fake.compiled.clear()
    for first, num_tokens in ((0, 1), (0, 16), (3, 20), (16, 300)):
        wire = memoryview(bytearray(num_tokens * computer.kv_layout.bytes_per_token))
        computer.read_kv(KvRun(list(range(20)), first, num_tokens), wire)
        computer.write_kv(KvRun(list(range(20)), first, num_tokens), wire)
    assert Counter(each.name for each in fake.compiled) == {}


@triton.jit
def _broken_kernel(x_ptr):  # type: ignore[no-untyped-def]
    tl.static_assert(False, "it is broken")


def test_kernel_that_cannot_be_compiled_is_an_error_of_its_start(fake: FakeDriver) -> None:
    """Though another thread compiles it."""
    with pytest.raises(triton.CompilationError), compiling_on_meta(lambda: None):
        _broken_kernel[(1,)](torch.empty(1, device="meta"), enable_fp_fusion=True)
