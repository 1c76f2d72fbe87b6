"""A worker's start compiles its kernels without launching one; what it compiles is in
`worker_keys/`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.device import IS_INTERPRETED

pytest.importorskip("triton")
if IS_INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
import triton.language as tl

from kernels.compile_on_meta import compiling_on_meta
from shared.engine.executors.cuda.compile_kernels import StepKernels, compile_kernels
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.loading.model_loading import finish_model, kv_layout_of
from shared.engine.executors.loading.warm_up import idle_step
from shared.engine.executors.step_computer import StepComputer
from shared.engine.kv.kv_cache import allocate_kv_cache
from shared.engine.models.checkpoint_config import read_config
from shared.engine.models.decoder import Decoder
from tests.support.engine.checkpoints import write_llama
from tests.support.kernels.fake_driver import FakeDriver
from tests.support.kernels.triton_ops import triton_ops

OPTIONS = LoadOptions(max_batch_tokens=64, max_sequences=16)


@pytest.fixture(scope="module")
def computer(tmp_path_factory: pytest.TempPathFactory) -> StepComputer:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, num_hidden_layers=1)
    config = read_config(folder)
    kv_layout = kv_layout_of(config, "bfloat16", 16)
    model = Decoder(config, dtype=torch.bfloat16, num_positions=2048).eval()
    return StepComputer(model, allocate_kv_cache(kv_layout, 64, torch.device("cpu")), kv_layout)


@pytest.fixture(scope="module")
def driver() -> Iterator[FakeDriver]:
    with triton_ops() as driver:
        yield driver


def test_compiled_kernels_are_launched_later(computer: StepComputer, driver: FakeDriver) -> None:
    finish_model(computer.model, OPTIONS.mode, is_compressed=False)
    compile_kernels(StepKernels(computer.model, computer.kv_layout, 64, OPTIONS))
    compiled = [each.name for each in driver.compiled]
    assert "_decode_attention_kernel" in compiled
    assert driver.num_launches == 0
    computer.run(idle_step(16, [1, 1, 7]))
    assert driver.num_launches > 0
    assert [each.name for each in driver.compiled] == compiled


@triton.jit
def _broken_kernel(x_ptr):  # type: ignore[no-untyped-def]
    tl.static_assert(False, "it is broken")


def test_kernel_that_cannot_be_compiled_is_an_error_of_its_start(driver: FakeDriver) -> None:
    """Though another thread compiles it."""
    with pytest.raises(triton.CompilationError), compiling_on_meta(lambda: None):
        _broken_kernel[(1,)](torch.empty(1, device="meta"), enable_fp_fusion=True)
