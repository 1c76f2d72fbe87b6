"""The distribution of a decode step's time: torch and compiled kernels, or the engine around them.

The engine over the random 125 M checkpoint, batch 64, greedy, one thread. Every other step times
each call from Python into torch or a compiled kernel, attributed to the calling file; the steps in
between run unmodified. The difference between their time and the calls is overhead: scheduling,
building inputs, applying sampled tokens, and in `run` the Python of layers and kernels, numpy's
argmax, and the switch to the step's thread and back. All figures are medians of wall time, so the
machine should be idle. The process's CPU clock would be less sensitive, but reading it takes 4 us
between such calls (and 15 to 50 us on other virtual machines), wall time 1 us: with hundreds of
calls per step this would appear as engine time.

    python -m benchmarks.engine_overhead [--steps 100]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import msgspec
import torch
import uvloop
from numba.core.registry import CPUDispatcher
from torch.overrides import TorchFunctionMode

from benchmarks.checkpoints import LLAMA_125M, write_random_llama
from benchmarks.engine_cpu import CONTEXT, MAX_BATCH_TOKENS, make_cases, sequences_of
from benchmarks.report import Row, at_most, write_result
from shared.engine.engine import Engine
from shared.engine.executors.cpu_executor import CpuExecutor
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.step import StepInputs, StepOutput

BATCH = 64
MAX_OVERHEAD = 0.15  # share of the step
CRUMB = 0.005

Times = dict[str, float]  # part of a step -> seconds


class Calls(TorchFunctionMode):
    """While entered, times the thread's calls into torch, and all calls into compiled kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.times: Times = defaultdict(float)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._timed(func, args, kwargs or {})

    def __enter__(self) -> Calls:
        native = CPUDispatcher.__call__

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._timed(native, args, kwargs)

        self._patch = mock.patch.object(CPUDispatcher, "__call__", call)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patch.stop()

    def _timed(self, func: Any, args: Any, kwargs: Any) -> Any:
        part = part_of(sys._getframe(2))
        started = time.perf_counter()
        try:
            return func(*args, **kwargs)
        finally:
            self.times[part] += time.perf_counter() - started


def part_of(frame: FrameType | None) -> str:
    """Returns the kernel that the engine called, or the engine's file that called torch
    directly.
    """
    kernel = None
    while frame is not None:
        name = frame.f_globals["__name__"]
        if name.startswith("shared.engine."):
            return kernel or name
        if name.startswith("kernels.") and name != "kernels.ops":
            kernel = name
        frame = frame.f_back
    return kernel or "elsewhere"


class ProfiledExecutor(CpuExecutor):
    calls: Calls | None = None  # calls of the next step

    def _run(self, inputs: StepInputs) -> StepOutput:
        if self.calls is None:
            return super()._run(inputs)
        with self.calls:
            return super()._run(inputs)


async def step(engine: Engine, executor: CpuExecutor) -> Times:
    """Runs one iteration of the engine's loop, timed by part."""
    laps = [time.perf_counter()]
    rows, _ = engine.schedule()
    laps.append(time.perf_counter())
    number = executor.submit(rows)
    laps.append(time.perf_counter())
    output = await executor.result(number)
    laps.append(time.perf_counter())
    engine.apply(rows, output)
    laps.append(time.perf_counter())
    parts = ("schedule", "build inputs", "run", "apply")
    return dict(zip(parts, (b - a for a, b in itertools.pairwise(laps)), strict=True))


async def profile(model_dir: Path, num_steps: int) -> tuple[Times, Times]:
    """Returns medians: of the parts of an unmodified step, and of the calls of a timed one."""
    executor = ProfiledExecutor.load(model_dir, LoadOptions(dtype="bfloat16", num_threads=1))
    engine = Engine(
        num_blocks=executor.num_blocks,
        block_size=executor.kv_layout.block_size,
        max_context_tokens=CONTEXT,
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_sequences=BATCH,
        reaches=executor.kv_layout.reaches,
    )
    case = next(c for c in make_cases(executor.vocab_size, 0) if c.name == f"batch {BATCH}")
    for sequence in sequences_of(
        msgspec.structs.replace(case, num_output_tokens=[CONTEXT] * BATCH)
    ):
        engine.add(sequence)
    while engine.num_uncomputed_tokens or len(engine.batcher.running) < BATCH:
        await step(engine, executor)
    plain: list[Times] = []
    timed: list[Times] = []
    for _ in range(num_steps // 2):
        executor.calls = None
        plain.append(await step(engine, executor))
        executor.calls = Calls()
        await step(engine, executor)
        timed.append(executor.calls.times)
    await executor.close()
    return medians(plain), medians(timed)


def medians(steps: list[Times]) -> Times:
    return {part: statistics.median(each[part] for each in steps) for part in steps[-1]}


def rows_of(plain: Times, calls: Times) -> list[Row]:
    """Returns one row per part; everything except torch and compiled kernels is the engine."""
    engine = plain | {"run": plain["run"] - sum(calls.values())}
    total = sum(plain.values())
    return [
        {
            "part": part,
            "ms": round(seconds * 1e3, 3),
            "share": round(seconds / total, 4),
            "where": "engine" if times is engine else "kernels",
        }
        for times in (without_crumbs(calls, total), engine)
        for part, seconds in sorted(times.items(), key=lambda each: -each[1])
    ]


def without_crumbs(calls: Times, total: float) -> Times:
    """Returns the parts by their file's name; small ones are combined."""
    kept: Times = defaultdict(float)
    for part, seconds in calls.items():
        is_crumb = seconds < CRUMB * total
        kept["other calls" if is_crumb else part.rpartition(".")[2]] += seconds
    return kept


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_random_llama(Path(folder), LLAMA_125M, dtype="bfloat16")
        rows = rows_of(*uvloop.run(profile(Path(folder), options.steps)))
    overhead = sum(row["share"] for row in rows if row["where"] == "engine")
    bars = [at_most("overhead / step", overhead, MAX_OVERHEAD, "")]
    write_result("engine_overhead", rows, bars, ["-m", "benchmarks.engine_overhead", *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
