"""Ranks for a CUDA device that are made of CPU tensors. Their processes import this module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Condition, Event
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import OutOfMemoryError

from shared.engine.executors.cuda.cuda_executor import CudaExecutor
from shared.engine.executors.group.cuda_rank import CudaRank
from shared.engine.executors.group.messages import DeviceSetup
from shared.engine.executors.loading.load_options import OnPhase
from shared.engine.parallel.processes.rank_process import RankContext
from shared.engine.step import StepInputs, StepOutput
from shared.errors import NoCapacity
from tests.shared.engine.executors.cuda.fake_device import FakeDriver, FakeEvent, Replays, load
from tests.shared.engine.executors.cuda.late_device import load_late

# Of a prompt: its launch never returns; its step raises; all steps from it on raise
HANGING_TOKEN, FAILING_TOKEN, STICKY_TOKEN = 195, 196, 197
LARGE_TOKEN = 194  # its step lacks memory
MOST_BLOCKS = 1000  # that the device has memory for
PARKED_BYTES = 12_345  # of weights
OVERLAP_S = 0.5


def late_rank(context: RankContext) -> CudaRank:
    """Its device does its work late."""
    return CudaRank(context, partial(_loaded, load_late, seed=1))


def failing_rank(context: RankContext) -> CudaRank:
    """Raises for some tokens, and counts as tokens of an expert the answers that were awaited while
    the next step was launched.
    """
    return CudaRank(context, _load_failing)


def _loaded(
    load: Callable[..., CudaExecutor], setup: DeviceSetup, on_phase: OnPhase, **options: Any
) -> CudaExecutor:
    on_phase("compiling")
    return load(Path(setup.model_dir), answers_apart=True, **options)


class PairedEvent(FakeEvent):
    """Waits for the launch of the next step, or OVERLAP_S."""

    def __init__(self, driver: PairedDriver) -> None:
        super().__init__([])
        self._driver = driver
        self._number = driver.num_launched

    def synchronize(self) -> None:
        driver = self._driver
        with driver.changed:
            driver.num_overlapping += driver.changed.wait_for(
                lambda: driver.num_launched > self._number, OVERLAP_S
            )


class PairedDriver(FakeDriver):
    def __init__(self) -> None:
        super().__init__()
        self.changed = Condition()
        self.num_launched = self.num_overlapping = 0

    def Event(self) -> PairedEvent:  # noqa: N802
        return PairedEvent(self)

    def count_launch(self) -> None:
        with self.changed:
            self.num_launched += 1
            self.changed.notify_all()


class Offloaded:
    """Weights of a parked executor, which stay in their place."""

    offloaded_bytes = 0

    def offload(self) -> None:
        self.offloaded_bytes = PARKED_BYTES

    def restore(self) -> None:
        self.offloaded_bytes = 0

    def close(self) -> None: ...


def _load_failing(setup: DeviceSetup, on_phase: OnPhase) -> CudaExecutor:
    driver = PairedDriver()
    executor = _loaded(load, setup, on_phase, graphs=Replays(), driver=driver)
    computer, is_sick = executor.computer, Event()
    launch, resize = computer.launch, executor._resize_kv

    def launched(inputs: StepInputs) -> Callable[[], StepOutput]:
        driver.count_launch()
        tokens = inputs.input_ids.tolist()
        if HANGING_TOKEN in tokens:
            Event().wait()
        if LARGE_TOKEN in tokens:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if STICKY_TOKEN in tokens:
            is_sick.set()
        if is_sick.is_set() or FAILING_TOKEN in tokens:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return launch(inputs)

    def resized(num_blocks: int) -> None:
        if num_blocks > MOST_BLOCKS:
            raise NoCapacity(f"{num_blocks} blocks do not fit")
        resize(num_blocks)

    async def counts() -> NDArray[np.int64]:
        return np.array([[driver.num_overlapping]])

    executor._offload = Offloaded()  # type: ignore[assignment]
    computer.launch, executor._resize_kv = launched, resized  # type: ignore[method-assign]
    executor.expert_counts = counts  # type: ignore[method-assign]
    return executor
