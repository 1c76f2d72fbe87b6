"""A recording of some steps by torch's profiler, as a trace that a browser shows.

It has names and times of operations and kernels, and of each step how many rows and tokens it had.
Shapes of operations are left out: with them the profiler records arguments, such as an index that
is a token.
"""

from __future__ import annotations

import asyncio
import gzip
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from shared.engine.executors.executor import RecordedSteps
from shared.engine.step import StepInputs

COMPRESSION = 6
COPIED_BYTES = 1 << 20


class StepProfile:
    """Records the next `num_steps` steps. `start`, `step` and `stop` run on the step thread."""

    def __init__(self, num_steps: int, device_type: str) -> None:
        self.num_steps = 0  # recorded ones
        self._num_wanted = num_steps
        self._has_gpu = device_type == "cuda"
        self._profiler: Any = None
        self.is_recording = False
        self._complete = Future[None]()

    def start(self) -> None:
        from torch.profiler import ProfilerActivity, profile  # nobody else needs it

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._has_gpu else [])]
        self._profiler = profile(activities=activities)
        self._profiler.start()
        self.is_recording = True

    @contextmanager
    def step(self, inputs: StepInputs) -> Iterator[None]:
        """Records a step, if the recording is not complete."""
        if not self.is_recording:
            yield
            return
        try:
            with torch.profiler.record_function(_label(inputs)):
                yield
        finally:
            self.num_steps += 1
            if self.num_steps == self._num_wanted:
                self.stop()

    def stop(self) -> None:
        """Ends the recording, once a GPU has computed what it was given."""
        if self.is_recording:
            self.is_recording = False
            self._profiler.stop()
            self._complete.set_result(None)

    async def complete(self, timeout_s: float) -> None:
        """Returns when all steps are recorded, or after the time."""
        await asyncio.wait({asyncio.wrap_future(self._complete)}, timeout=timeout_s)

    def recorded(self) -> RecordedSteps:
        """Runs on any thread, after `stop`."""
        with TemporaryDirectory(prefix="hearth-profile-") as folder:
            written, packed = Path(folder) / "trace.json", Path(folder) / "trace.json.gz"
            self._profiler.export_chrome_trace(str(written))
            with written.open("rb") as source, gzip.open(packed, "wb", COMPRESSION) as target:
                shutil.copyfileobj(source, target, COPIED_BYTES)
            return RecordedSteps(self.num_steps, packed.read_bytes())


def _label(inputs: StepInputs) -> str:
    num_context = int(inputs.context_lens.sum())
    return (
        f"step: {len(inputs.query_lens)} rows, {len(inputs.input_ids)} tokens, "
        f"{num_context} of context"
    )
