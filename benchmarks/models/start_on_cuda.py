"""The cost of a CUDA worker's start besides reading, copying and compiling, in an 8B model's
shapes.

It needs no GPU: tensors are on the CPU and a fake driver counts launches. Bars: at most one step
runs, and Python of this project takes at most a second, in the CPU time of the loading thread: its
second passes over the kernels' keys, when all are compiled. The step's own operators take seconds
on a CPU and are not counted; its launches are.

    python -m benchmarks.models.start_on_cuda [--mode exact|fast]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

from benchmarks.gpu_kit.dry.dry_device import dry_device
from benchmarks.gpu_kit.model_steps.loading import cpu_as_cuda
from benchmarks.gpu_kit.shapes import CONFIG_8B
from benchmarks.report import Row, at_most, write_result
from shared.engine.executors.cuda import cuda_load
from shared.engine.executors.cuda.compile_kernels import StepKernels, compile_kernels
from shared.engine.executors.cuda.cuda_executor import CudaExecutor
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.step_computer import StepComputer

MAX_BATCH_TOKENS = 8192
KV_BYTES = 1 << 31
MAX_PYTHON_S, MAX_STEPS = 1.0, 1


def measure(folder: Path, mode: str) -> Row:
    options = LoadOptions(
        dtype="bfloat16",
        load_format="dummy",
        mode=mode,  # type: ignore[arg-type]
        max_batch_tokens=MAX_BATCH_TOKENS,
        kv_cache_bytes=KV_BYTES,
        block_size=64,
    )
    with (
        dry_device("ttir") as driver,
        patch.object(cuda_load, "load_weights", lambda *_: None),
        patch.object(StepComputer, "run", autospec=True, side_effect=StepComputer.run) as run,
    ):
        executor = CudaExecutor.load(folder, options, cpu_as_cuda())
        num_launches, num_kernels = driver.num_launches, len(driver.compiled)
        began = time.thread_time()
        for num_blocks in (1, executor.num_blocks):  # `load` uses both, too
            kernels = StepKernels(executor.computer.model, executor.kv_layout, num_blocks, options)
            compile_kernels(kernels)
        python_s = time.thread_time() - began
    return {
        "mode": mode,
        "python_s": round(python_s, 3),
        "steps": run.call_count,
        "launches": num_launches,
        "kernels": num_kernels,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("exact", "fast"), default="exact")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG_8B))
        row = measure(folder, arguments.mode)
    bars = [
        at_most("Python of a start", row["python_s"], MAX_PYTHON_S, "s"),
        at_most("steps of a start", row["steps"], MAX_STEPS, ""),
    ]
    command = ["-m", "benchmarks.models.start_on_cuda", *sys.argv[1:]]
    write_result("start_on_cuda", [row], bars, command)


if __name__ == "__main__":
    main()
