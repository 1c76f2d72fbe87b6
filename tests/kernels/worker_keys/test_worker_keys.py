"""Whatever a worker on CUDA does once it is ready, all its kernels were compiled before.

The small models have every option of every family, in workers whose options are drawn; those of
real sizes have the tiles of real GEMMs.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import get_args

import pytest

from kernels.device import IS_INTERPRETED

pytest.importorskip("triton")
if IS_INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from benchmarks.gpu_kit.dry.dry_device import dry_device
from shared.engine.executors.cuda.compile_kernels import StepKernels, compile_kernels
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.loading.model_loading import set_mode
from shared.numerics import Mode
from tests.kernels.compiled.family_sizes import CASES as SIZED
from tests.kernels.compiled.family_sizes import computer_of
from tests.kernels.compiled.launch_classes import recording
from tests.kernels.worker_keys.steps import Steps
from tests.kernels.worker_keys.worker import Case, run_everything, started
from tests.support.engine.families import FAMILIES
from tests.support.grids import in_short_run

MODES: tuple[Mode, ...] = get_args(Mode)
SEEDS = range(4)
STEPS = 60
CASES = [Case(family, mode, seed) for seed in SEEDS for family in FAMILIES for mode in MODES]
# Windows in fast mode, latents and experts in exact mode.
SHORT = {Case("gemma2", "fast", 1), Case("deepseek", "exact", 0), Case("qwen3 moe", "exact", 1)}
SHORT_SIZED = {("Llama 3.1 8B, split weights", "exact")}


@pytest.mark.parametrize("case", in_short_run(SHORT, CASES), ids=str)
def test_ready_worker_compiles_nothing(case: Case, tmp_path: Path) -> None:
    with started(case, tmp_path) as (executor, options, found):
        ready = set(found)
        run_everything(case, executor, options, STEPS)
        late = [each.text for key, each in found.items() if key not in ready]
    assert late == [], options


@pytest.mark.parametrize(
    ("case", "mode"),
    in_short_run(SHORT_SIZED, [(case, mode) for case in SIZED for mode in MODES]),
)
def test_steps_of_real_sizes_compile_nothing(case: str, mode: Mode, tmp_path: Path) -> None:
    """All numbers of decodes, and drawn prompts, on meta tensors."""
    options = LoadOptions(mode=mode, max_batch_tokens=8192, max_sequences=256, block_size=64)
    with dry_device("ttir"), recording() as found:
        computer = computer_of(tmp_path, case)
        set_mode(computer.model, mode)
        layout = computer.kv_layout
        kernels = StepKernels(computer.model, layout, 4096, options)
        compile_kernels(kernels)
        ready = set(found)
        steps = Steps(Random(case), options, len(layout.groups), computer.model.config.vocab_size)
        drawn = [steps.decodes(rows) for rows in range(1, 257)]
        drawn += [each() for each in (steps.prompts, steps.mixed) for _ in range(STEPS)]
        kernels.steps = lambda _: iter(drawn)  # type: ignore[method-assign]
        compile_kernels(kernels)
    assert [each.text for key, each in found.items() if key not in ready] == []
