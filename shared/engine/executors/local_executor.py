"""Steps of a torch model in this process.

Steps run on one thread, copies from and to the cache on a second one, so that a push of KV does not
wait for a step, nor a step for a push. `CpuExecutor` and `CudaExecutor` add what is of the device.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray
from torch import Tensor

from shared.clock import MonotonicClock
from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.executors.executor import PROFILE_S, RecordedSteps, StepLaunch
from shared.engine.executors.loading.device_numerics import device_numerics
from shared.engine.executors.loading.local_work import local_work
from shared.engine.executors.loading.warm_up import CHECKED_LENS, idle_step
from shared.engine.executors.step_computer import StepComputer
from shared.engine.executors.step_deadline import StepBudget, step_units
from shared.engine.executors.step_profile import StepProfile
from shared.engine.executors.step_queue import Answer, StepQueue
from shared.engine.step import KvRun, StepInputs, StepOutput
from shared.engine.weights.weight_form import WeightsReport, weights_report
from shared.kv_layout import KvLayout
from shared.kv_wire.link import PageLock
from shared.messages import DevicePeaks
from shared.numerics import Activations, Mode

NOT_PROFILED = nullcontext()

log = structlog.get_logger(__name__)


class LocalExecutor:
    """An `Executor` of depth 1, and the `KvMemory` of the whole cache. Its step starts when the
    result is awaited, unless a subclass does otherwise. `revision` is a digest of config and
    weights.

    `init_step_thread` and `init_copy_thread` run first on their threads.
    """

    depth = 1
    num_stages = 1
    has_ended = False
    gpu_uuid = ""
    num_out_of_memory = 0
    page_lock: PageLock | None = None
    peaks: DevicePeaks | None = None
    load_stages: Mapping[str, float] = {}  # NAME_s: seconds, of those that a device tells

    def __init__(
        self,
        computer: StepComputer,
        *,
        num_blocks: int,
        max_blocks: int,
        is_elastic: bool,
        revision: str,
        mode: Mode,
        activations: Activations = "plain",
        init_step_thread: Callable[[], None] | None = None,
        init_copy_thread: Callable[[], None] | None = None,
    ) -> None:
        config = computer.model.config
        self.computer = computer
        self.revision = revision
        self.kv_layout = computer.kv_layout
        _log_groups(self.kv_layout)
        device = computer.kv_cache.device
        dtype = str(computer.model.dtype).removeprefix("torch.")
        self.numerics = device_numerics(
            device, dtype, mode, activations, kv_dtype=self.kv_layout.dtype
        )
        self.num_blocks = num_blocks
        self.max_blocks = max_blocks
        self.is_elastic = is_elastic
        self.max_context_tokens = computer.model.cos.shape[0]
        self.vocab_size = config.vocab_size
        self.eos_token_ids = config.eos_token_ids
        self.has_head = config.has_head
        self.work = local_work(
            config,
            self.weights,
            item_bytes=computer.model.dtype.itemsize,
            kv_dtype=self.kv_layout.dtype,
        )
        self.step_budget_s = 0.0
        self._steps = StepQueue(
            self.kv_layout.block_size, len(self.kv_layout.groups), self.start_in_time
        )
        self._budgets = deque[float]()  # seconds of each step in flight
        self._budget = StepBudget()
        self._clock = MonotonicClock()
        self._profile: StepProfile | None = None
        self._step_thread = ThreadPoolExecutor(1, "engine-step", initializer=init_step_thread)
        self._copy_thread = ThreadPoolExecutor(1, "engine-copy", initializer=init_copy_thread)

    @property
    def weights(self) -> WeightsReport:
        return weights_report(self.computer.model)

    @property
    def step_launch(self) -> StepLaunch:
        return ""

    @property
    def offloaded_bytes(self) -> int:
        return 0

    @property
    def step_extension_s(self) -> float:
        return self._budget.extension_s + (PROFILE_S if self._profile is not None else 0.0)

    def submit(self, rows: list[ScheduledSequence]) -> int:
        return self._steps.submit(rows, self.depth)

    async def result(self, step: int) -> StepOutput:
        return await self._steps.result(step)

    async def run(self, inputs: StepInputs) -> StepOutput:
        """Computes a step on the step thread."""
        return await self.start(inputs)()

    def start(self, inputs: StepInputs) -> Answer:
        """Begins a step after those before it. Their answers are awaited in the same order."""
        return partial(self._launch, self._run, inputs)

    def start_in_time(self, inputs: StepInputs) -> Answer:
        """Begins a step like `start`, and sets the time that the steps in flight may take."""
        budget_s = self._budget.seconds(step_units(inputs), is_first=not self._budgets)
        answer = self.start(inputs)  # may compile a kernel at once
        self._budgets.append(budget_s)
        self.step_budget_s = sum(self._budgets)
        return partial(self._in_time, answer)

    async def _in_time(self, answer: Answer) -> StepOutput:
        try:
            return await answer()
        finally:
            self._budgets.popleft()

    def step_logits(self, inputs: StepInputs) -> Tensor:
        """Computes a step on the calling thread. Returns [R, vocab_size] FP32."""
        return self.computer.step_logits(inputs)

    async def forget_ended(self) -> None:
        self._steps.end_rows()

    async def check(self) -> None:
        """Runs a step of a prompt and a decode, which both sample a token."""
        layout = self.kv_layout
        num_groups = len(layout.groups)
        await self.run(
            idle_step(layout.block_size, CHECKED_LENS, temperature=1.0, num_groups=num_groups)
        )

    async def read_kv(self, run: KvRun, out: memoryview) -> None:
        await self._copy(self.computer.read_kv, run, out)

    async def write_kv(self, run: KvRun, payload: memoryview) -> None:
        await self._copy(self.computer.write_kv, run, payload)

    async def zero_blocks(self, block_ids: list[int]) -> None:
        await self._launch(self.computer.zero_blocks, block_ids)

    async def give_back(self, block_ids: list[int]) -> None:
        await self._launch(self.computer.give_back, block_ids)

    async def resize_kv(self, num_blocks: int) -> None:
        await self._launch(self._resize_kv, num_blocks)

    async def expert_counts(self) -> NDArray[np.int64] | None:
        counts: NDArray[np.int64] | None = await self._launch(self.computer.expert_counts)
        return counts

    async def profile(self, num_steps: int, timeout_s: float) -> RecordedSteps:
        """Steps meanwhile have more time: the first recording loads libraries, and its end waits
        for all events.
        """
        profile = self._profile = StepProfile(num_steps, self.computer.kv_cache.device.type)
        try:
            await _on(self._step_thread, profile.start)
            await profile.complete(timeout_s)
        finally:
            await _on(self._step_thread, profile.stop)
            self._profile = None
        return await asyncio.to_thread(profile.recorded)

    async def close(self) -> None:
        """Waits for the current step and copies."""
        loop = asyncio.get_running_loop()
        for thread in (self._step_thread, self._copy_thread):
            await loop.run_in_executor(None, thread.shutdown)

    async def _launch(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function on the step thread."""
        return await _on(self._step_thread, function, *arguments)

    async def _copy(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function on the copy thread."""
        await _on(self._copy_thread, function, *arguments)

    def _resize_kv(self, num_blocks: int) -> None:
        """Runs on the step thread."""
        raise NotImplementedError

    def _run(self, inputs: StepInputs) -> StepOutput:
        """Runs on the step thread."""
        started = self._clock.now()
        with self._profiled(inputs):
            output = self.computer.run(inputs)
        self._observe(step_units(inputs), self._clock.now() - started)
        return output

    def _profiled(self, inputs: StepInputs) -> AbstractContextManager[None]:
        """Returns the context in which the step is computed, on the step thread."""
        profile = self._profile
        return NOT_PROFILED if profile is None else profile.step(inputs)

    def _observe(self, units: float, elapsed_s: float) -> None:
        """Steps that are recorded are slower, and say nothing of the pace."""
        if self._profile is None:
            self._budget.observe(units, elapsed_s)


def _log_groups(layout: KvLayout) -> None:
    """Logs the slots that stay unused: with several groups of layers, short ones do not fill
    blocks.
    """
    if len(layout.groups) > 1:
        log.info(
            "kv_groups",
            layers=[len(group.layers) for group in layout.groups],
            num_unused_slots=len(layout.groups) * layout.num_slots - layout.num_layers,
        )


async def _on(thread: ThreadPoolExecutor, function: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(thread, function, *arguments)
