"""A model on one CUDA device, to which its threads are bound."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.device import on_triton_compile
from shared.engine.executors.cuda.copy_stream import CopyStream, Mark
from shared.engine.executors.cuda.cuda_device import (
    CudaDevice,
    is_out_of_memory,
    telling_of_memory,
)
from shared.engine.executors.cuda.cuda_load import load_on_cuda
from shared.engine.executors.cuda.data_sheets import data_sheet_peaks
from shared.engine.executors.cuda.graph_computer import GraphComputer
from shared.engine.executors.cuda.idle_captures import IdleCaptures
from shared.engine.executors.cuda.libraries import attention_name
from shared.engine.executors.cuda.offload.weight_offload import WeightOffload
from shared.engine.executors.cuda.page_lock import CudaPageLock
from shared.engine.executors.executor import StepLaunch
from shared.engine.executors.loading.load_options import LoadOptions, OnPhase, ignore_phase
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.executors.step_deadline import step_units
from shared.engine.executors.step_queue import MOST_AHEAD, Answer
from shared.engine.kv.kv_cache import allocate_kv_cache
from shared.engine.kv.kv_parts import halves
from shared.engine.step import KvRun, StepInputs, StepOutput
from shared.errors import NoCapacity, OutOfMemory
from shared.telemetry.stage_times import StageTimes

COUNTS_POLL_S = 0.001


class _Launched(NamedTuple):
    """A step that is launched: `read` returns its output once the device is at `mark`."""

    read: Callable[[], StepOutput]
    mark: Mark
    began_at: float


class CudaExecutor(LocalExecutor):
    """Create it with `load`. Steps run on the device's default stream, copies on another one.

    With `answers_apart` a thread of its own waits for the device: a step may then be launched while
    the answer of the one before it is awaited. Without it, it has to be submitted before that.
    """

    computer: GraphComputer

    def __init__(
        self,
        computer: GraphComputer,
        device: CudaDevice,
        *,
        num_blocks: int,
        revision: str,
        options: LoadOptions,
        answers_apart: bool = False,
    ) -> None:
        super().__init__(
            computer,
            num_blocks=num_blocks,
            max_blocks=options.kv_ceiling(computer.kv_layout, num_blocks),
            is_elastic=False,
            revision=revision,
            mode=options.mode,
            activations=options.activations,
            init_step_thread=device.bind,
            init_copy_thread=device.bind,
        )
        self._device = device
        self._gpu_memory = options.gpu_memory
        self.gpu_uuid = device.uuid if device.tensors_on.type == "cuda" else ""
        self._read_at = 0.0  # the last step's output
        self._answer_thread = self._step_thread
        if answers_apart:
            self._answer_thread = ThreadPoolExecutor(1, "engine-answer", initializer=device.bind)
        self._num_repeated = 0  # operations that had too little memory at first
        self._copies = CopyStream(device)
        self.page_lock = CudaPageLock(device)
        self._captures = IdleCaptures(computer.has_graphs_left, self._capture_next)
        self._offload: WeightOffload | None = None
        if options.parked_weights == "host":
            model, changing = computer.model, computer.expert_sums()
            self._offload = WeightOffload(model, changing, device, self.page_lock.lock)
        if device.tensors_on.type == "cuda":
            self.peaks = data_sheet_peaks(torch.cuda.get_device_name(device.index))
            on_triton_compile(self._budget.compiling)

    @property
    def depth(self) -> int:  # type: ignore[override]
        """With graphs the host prepares a step while the device computes the one before it."""
        return 1 if self.computer.graphs is None else MOST_AHEAD

    def start(self, inputs: StepInputs) -> Answer:
        """Launches the step once those before it are launched, not computed."""
        launched = self._step_thread.submit(self._launch_step, inputs)
        return partial(self._answer, launched, step_units(inputs))

    def start_in_time(self, inputs: StepInputs) -> Answer:
        answer = super().start_in_time(inputs)
        self._captures.begin_step()
        return partial(self._not_idle, answer)

    async def _not_idle(self, answer: Answer) -> StepOutput:
        try:
            return await answer()
        finally:
            self._captures.end_step()

    @property
    def num_out_of_memory(self) -> int:  # type: ignore[override]
        """Copies, zeroings and captures of graphs."""
        graphs = self.computer.graphs
        return self._num_repeated + (0 if graphs is None else graphs.num_out_of_memory)

    async def read_kv(self, run: KvRun, out: memoryview) -> None:
        await self._copy_in_parts(self.computer.read_kv, run, out)

    async def write_kv(self, run: KvRun, payload: memoryview) -> None:
        await self._copy_in_parts(self.computer.write_kv, run, payload)

    async def zero_blocks(self, block_ids: list[int]) -> None:
        try:
            await super().zero_blocks(block_ids)
        except OutOfMemory:
            self._num_repeated += 1
            await super().zero_blocks(block_ids)

    async def close(self) -> None:
        await self._captures.stop()
        await super().close()
        self._answer_thread.shutdown(wait=False)  # nothing is awaited
        if self._offload is not None:
            self._offload.close()

    @property
    def step_launch(self) -> StepLaunch:
        graphs = self.computer.graphs
        has_cudnn = attention_name(self.computer.model) == "cudnn"
        if graphs is None or not graphs.is_usable:
            return "plain, cudnn" if has_cudnn else "plain"
        return "graphs, cudnn" if has_cudnn else "graphs"

    @classmethod
    def load(
        cls,
        model_dir: Path,
        options: LoadOptions,
        device: CudaDevice,
        on_phase: OnPhase = ignore_phase,
        times: StageTimes | None = None,
        *,
        answers_apart: bool = False,
    ) -> Self:
        """Binds the calling thread. Kernels are compiled by their keys while the weights are read;
        then one step shows what memory steps need. `times` has the stages before. Raises
        CheckpointError for a bad checkpoint, ConfigError for a bad option or for a device that
        cannot run kernels or has no memory for KV.
        """
        loaded = load_on_cuda(model_dir, options, device, on_phase, times)
        executor = cls(
            loaded.computer,
            device,
            num_blocks=loaded.num_blocks,
            revision=loaded.revision,
            options=options,
            answers_apart=answers_apart,
        )
        executor.load_stages = loaded.stages
        if options.is_parked:
            executor._release_memory()
        return executor

    async def _launch(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            result, _ = await self._on_device(
                super()._launch, self._copies.launch, function, *arguments
            )
        finally:
            self._copies.deliver()
        return result

    async def _on_device(self, call: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """Awaits `call`. Raises OutOfMemory once what torch caches has gone back: after all steps
        that are launched, on their thread, because graphs may be captured there.
        """
        try:
            with telling_of_memory():
                return await call(*arguments)
        except OutOfMemory:
            await super()._launch(self._device.release_cached)
            raise

    def _launch_step(self, inputs: StepInputs) -> _Launched:
        """Runs on the step thread."""
        began_at = self._clock.now()
        with self._profiled(inputs):
            read, mark = self._copies.launch(self.computer.launch, inputs)
        return _Launched(read, mark, began_at)

    async def _answer(self, launched: Future[_Launched], units: float) -> StepOutput:
        """Waits on the answer thread. If that is the step thread, a step that is submitted before
        this is launched first.
        """
        mark = None
        loop = asyncio.get_running_loop()
        try:
            output, mark = await self._on_device(
                loop.run_in_executor, self._answer_thread, self._wait, launched, units
            )
        finally:
            self._copies.deliver(mark)
        return output

    def _wait(self, launched: Future[_Launched], units: float) -> tuple[StepOutput, Mark]:
        """Runs on the answer thread."""
        read, mark, began_at = launched.result()
        mark.event.synchronize()
        output, now = read(), self._clock.now()
        self._observe(units, now - max(began_at, self._read_at))
        self._read_at = now
        return output, mark

    async def _copy(self, function: Callable[..., None], *arguments: Any) -> None:
        copies = self._copies
        await self._on_device(super()._copy, copies.copy, copies.delivered, function, *arguments)

    async def _copy_in_parts(
        self, copy: Callable[..., None], run: KvRun, memory: memoryview
    ) -> None:
        """Copies some layers at a time if the device has no memory for all."""
        try:
            await self._copy(copy, run, memory)
            return
        except OutOfMemory:
            self._num_repeated += 1
            parts = halves(self.kv_layout, run, memory)
            if len(parts) == 1:
                raise
        for part, view in parts:
            await self._copy_in_parts(copy, part, view)

    async def expert_counts(self) -> NDArray[np.int64] | None:
        """With graphs no thread waits for the device: steps are launched meanwhile. Binds the
        calling thread, which polls: CUDA makes a context on the current device of a thread.
        """
        if self.computer.graphs is None:
            return await super().expert_counts()
        self._device.bind()
        counts, mark = await self._on_device(
            super()._launch, self._copies.launch, self.computer.download_counts
        )
        if counts is None:
            return None
        while not mark.event.query():
            await self._clock.sleep(COUNTS_POLL_S)
        found: NDArray[np.int64] = counts.numpy()
        return found

    async def _capture_next(self) -> None:
        await self._launch(self.computer.capture_next)

    async def check(self) -> None:
        """A parked executor has no block to read, and maybe no weights."""
        if self.computer.kv_cache.numel():
            await super().check()

    @property
    def offloaded_bytes(self) -> int:
        """The bytes of weights that are in memory of the host."""
        return 0 if self._offload is None else self._offload.offloaded_bytes

    @property
    def offload_stages(self) -> Mapping[str, float]:
        """Returns NAME_s: the seconds of locking and copying in the last park or wake."""
        return {} if self._offload is None else self._offload.stages

    async def resize_kv(self, num_blocks: int) -> None:
        """Replaces the cache. The first steps after a wake come before captures of graphs."""
        await super().resize_kv(num_blocks)
        self._captures.begin()

    def _resize_kv(self, num_blocks: int) -> None:
        """Replaces the cache. Only the computer refers to the old one, so its memory is
        free then. After any error there is none, and weights are offloaded.
        """
        computer, target = self.computer, self._device.tensors_on
        computer.forget_graphs()
        computer.kv_cache = allocate_kv_cache(self.kv_layout, 0, target)
        if num_blocks == 0:
            self._release_memory()
            return
        self._device.release_cached()
        try:
            if self._offload is not None:
                self._offload.restore()
            computer.kv_cache = allocate_kv_cache(self.kv_layout, num_blocks, target)
        except BaseException as error:
            self._release_memory()
            if not is_out_of_memory(error):
                raise
            raise self._no_capacity(num_blocks) from None

    def _release_memory(self) -> None:
        """Returns the device's memory of weights, and what torch caches."""
        if self._offload is not None:
            self._offload.offload()
        self._device.release_cached()

    def _no_capacity(self, num_blocks: int) -> NoCapacity:
        needed = f"{num_blocks * self.kv_layout.block_bytes >> 20} MiB of KV"
        if self.offloaded_bytes:
            needed = f"{self.offloaded_bytes >> 20} MiB of weights and {needed}"
        room = f"{self._device.memory().free >> 20} MiB free on cuda:{self._device.index}"
        if self._gpu_memory:
            room = f"{room} and gpu_memory {self._gpu_memory}"
        return NoCapacity(f"{needed} do not fit the {room}")

    def step_logits(self, inputs: StepInputs) -> Tensor:
        """Binds the calling thread."""
        self._device.bind()
        logits, mark = self._copies.launch(super().step_logits, inputs)
        self._copies.deliver(mark)
        return logits
