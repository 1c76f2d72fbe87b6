"""A model on one CUDA device: binds its threads to it, sizes the KV cache by its free memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from kernels.device import on_triton_compile
from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.codec.manifest import is_bundle
from shared.engine.executors.cuda.compile_kernels import StepKernels, compile_kernels
from shared.engine.executors.cuda.copy_stream import CopyStream
from shared.engine.executors.cuda.cuda_device import CudaDevice
from shared.engine.executors.cuda.cuda_graphs import CudaGraphs
from shared.engine.executors.cuda.decode_graphs import beside_graphs, max_graphs_in
from shared.engine.executors.cuda.first_step import measure_gemms, run_largest_step
from shared.engine.executors.cuda.graph_computer import GraphComputer
from shared.engine.executors.cuda.idle_captures import IdleCaptures
from shared.engine.executors.cuda.meta_model import META
from shared.engine.executors.cuda.page_lock import CudaPageLock
from shared.engine.executors.executor import StepLaunch
from shared.engine.executors.loading.kv_scales import load_kv_scales
from shared.engine.executors.loading.kv_sizing import num_blocks_for, num_blocks_in
from shared.engine.executors.loading.load_options import LoadOptions, OnPhase, ignore_phase
from shared.engine.executors.loading.model_loading import (
    empty_model,
    finish_model,
    kv_layout_of,
    open_weights,
    resolve_dtype,
    set_mode,
)
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.kv.kv_cache import allocate_kv_cache
from shared.engine.kv.kv_dtype import resolve_kv_dtype
from shared.engine.models.checkpoint_config import read_config
from shared.engine.step import StepInputs, StepOutput
from shared.engine.weights.load import load_weights
from shared.engine.weights.reading.staging import LocalStaging, num_readers, pinned_ring
from shared.engine.weights.shared_weights import compress_weights
from shared.engine.weights.weight_form import uses_compressed
from shared.errors import ConfigError, NoCapacity


class CudaExecutor(LocalExecutor):
    """Create it with `load`. Steps run on the device's default stream, copies on another one."""

    computer: GraphComputer

    def __init__(
        self,
        computer: GraphComputer,
        device: CudaDevice,
        *,
        num_blocks: int,
        revision: str,
        options: LoadOptions,
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
        self._copies = CopyStream(device)
        self.page_lock = CudaPageLock(device)
        self._captures = IdleCaptures(computer.has_graphs_left, self._capture_next)
        if device.tensors_on.type == "cuda":
            on_triton_compile(self._budget.compiling)

    def submit(self, rows: list[ScheduledSequence]) -> int:
        step = super().submit(rows)
        self._captures.begin_step()
        return step

    async def result(self, step: int) -> StepOutput:
        try:
            return await super().result(step)
        finally:
            self._captures.end_step()

    async def close(self) -> None:
        await self._captures.stop()
        await super().close()

    @property
    def step_launch(self) -> StepLaunch:
        graphs = self.computer.graphs
        return "plain" if graphs is None or not graphs.is_usable else "graphs"

    @classmethod
    def load(
        cls,
        model_dir: Path,
        options: LoadOptions,
        device: CudaDevice,
        on_phase: OnPhase = ignore_phase,
    ) -> Self:
        """Binds the calling thread. Kernels are compiled by their keys while the weights are read;
        then one step shows what memory steps need. Raises CheckpointError for a bad checkpoint,
        ConfigError for a bad option or for a device that cannot run kernels or has no memory for
        KV.
        """
        device.bind()
        device.check_kernels()  # reading the model, which follows, takes minutes
        target, config = device.tensors_on, read_config(model_dir)
        is_compressed = uses_compressed(options.weights, model_dir, target, options.load_format)
        dtype = resolve_dtype(options.dtype, target)
        kv_dtype = resolve_kv_dtype(options.kv_dtype, dtype, config, target)
        kv_layout = kv_layout_of(config, kv_dtype, options.block_size)
        num_blocks, max_blocks = None, None
        if options.kv_cache_bytes is not None:
            num_blocks = num_blocks_for(kv_layout, options.kv_cache_bytes)
            max_blocks = options.kv_ceiling(kv_layout, num_blocks)
        elif options.is_parked:
            raise ConfigError(
                "a worker that starts parked needs kv_cache_bytes: what is free at its start is "
                "not what it gets later",
                param="kv_cache_bytes",
            )
        num_positions = options.context_tokens(config, max_blocks)
        model = empty_model(
            *(model_dir, config, dtype, target),
            num_positions=num_positions,
            weights_on=META if is_compressed else target,
        )
        has_graphs = options.executor == "auto" and target.type == "cuda"
        is_read = options.load_format != "dummy"  # "dummy" reads no files
        # a bundle is decoded in memory of its own
        is_staged = is_read and not is_bundle(model_dir)
        staging = pinned_ring(target) if is_staged else LocalStaging()
        with (
            ThreadPoolExecutor(
                num_readers() if is_read else 1, "read", initializer=device.bind
            ) as readers,
            open_weights(
                *(model_dir, config, model, options.load_format), staging=staging, readers=readers
            ) as source,
            ThreadPoolExecutor(1, "compile", initializer=device.bind) as thread,
        ):
            set_mode(model, options.mode)
            load_kv_scales(model, source.tensors, config, kv_layout)
            # The memory of quantized weights is no operand before `finish_model`.
            compiled = None
            if not config.is_quantized:
                kernels = StepKernels(model, kv_layout, num_blocks or 1, options)
                compiled = thread.submit(compile_kernels, kernels)
            if is_compressed:
                compress_weights(
                    model, model.weight_destinations(), source.tensors, target, readers
                )
            else:
                load_weights(source.tensors, model.weight_destinations(), readers)
            revision = source.revision()
            staging.close()
            on_phase("compiling")
            if compiled is not None:
                compiled.result()
        finish_model(
            model, options.mode, is_compressed=is_compressed, activations=options.activations
        )
        measure_gemms(model)
        device.release_cached()
        computer = GraphComputer(
            model,
            allocate_kv_cache(kv_layout, 1, target),
            kv_layout,
            check_thread=device.check_bound,
        )
        run_largest_step(computer, options)
        if num_blocks is None:
            report = device.memory()
            num_blocks = num_blocks_in(beside_graphs(report) if has_graphs else report, kv_layout)
        # Kernels of the weights' final forms and for the strides of the whole cache are included.
        compile_kernels(StepKernels(model, kv_layout, num_blocks, options))
        num_held = 0 if options.is_parked else num_blocks
        computer.kv_cache = allocate_kv_cache(kv_layout, num_held, target)
        if has_graphs:
            most = max_graphs_in(device.memory().total)
            computer.use_graphs(CudaGraphs(target), max_rows=options.max_sequences, max_graphs=most)
        return cls(
            computer,
            device,
            num_blocks=num_blocks,
            revision=revision,
            options=options,
        )

    async def _launch(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return await super()._launch(self._copies.launch, function, *arguments)
        finally:
            self._copies.deliver()

    async def _copy(self, function: Callable[..., None], *arguments: Any) -> None:
        await super()._copy(self._copies.copy, self._copies.delivered, function, *arguments)

    async def _capture_next(self) -> None:
        await self._launch(self.computer.capture_next)

    def _resize_kv(self, num_blocks: int) -> None:
        """Replaces the cache. Only the computer refers to the old one, so its memory is
        free then.
        """
        computer, target = self.computer, self._device.tensors_on
        computer.forget_graphs()
        computer.kv_cache = allocate_kv_cache(self.kv_layout, 0, target)
        self._device.release_cached()
        if num_blocks == 0:
            return
        try:
            computer.kv_cache = allocate_kv_cache(self.kv_layout, num_blocks, target)
        except torch.OutOfMemoryError:
            report = self._device.memory()
            raise NoCapacity(
                f"{num_blocks * self.kv_layout.block_bytes >> 20} MiB of KV do not fit the "
                f"{report.free >> 20} MiB that are free on cuda:{self._device.index}"
            ) from None

    def step_logits(self, inputs: StepInputs) -> Tensor:
        """Binds the calling thread."""
        self._device.bind()
        logits = self._copies.launch(super().step_logits, inputs)
        self._copies.deliver()
        return logits
