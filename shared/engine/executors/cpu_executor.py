"""A model on the CPU: compiled kernels, thread count by the size of a step, shared weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch
from torch import nn

from kernels.device import IS_INTERPRETED
from kernels.ops import cpu_host
from shared.engine.executors.loading.cpu_kernels import (
    RowKernels,
    compile_kernels,
    compile_plan,
    has_run,
    load_kernels,
)
from shared.engine.executors.loading.freed_memory import retain_freed_memory, return_freed_memory
from shared.engine.executors.loading.kv_scales import load_kv_scales
from shared.engine.executors.loading.kv_sizing import num_blocks_for
from shared.engine.executors.loading.load_options import LoadOptions, OnPhase, ignore_phase
from shared.engine.executors.loading.model_loading import (
    OpenedWeights,
    empty_model,
    finish_model,
    kv_layout_of,
    open_weights,
    resolve_dtype,
)
from shared.engine.executors.loading.warm_up import idle_step
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.executors.step_computer import StepComputer
from shared.engine.executors.step_threads import StepThreads
from shared.engine.kv.kv_cache import allocate_kv_cache
from shared.engine.kv.kv_dtype import resolve_kv_dtype
from shared.engine.layers.linear import MatmulModule
from shared.engine.models.checkpoint_config import read_config
from shared.engine.models.decoder import Decoder
from shared.engine.step import KvRun, StepInputs, StepOutput
from shared.engine.weights.load import load_weights
from shared.engine.weights.shared_weights import (
    compress_weights,
    map_weights,
    weights_cache_dir,
)
from shared.engine.weights.weight_form import uses_compressed
from shared.numerics import Activations, Mode

DEFAULT_KV_CACHE_BYTES = 1 << 30
# Larger copies run on the copy thread. While steps run, nine of ten copies of 36 KiB take under
# 0.1 ms here and 2 ms there: each of the two ways waits for the interpreter lock.
MAX_INLINE_BYTES = 256 << 10
_CPU = torch.device("cpu")


class CpuExecutor(LocalExecutor):
    """Construct with `load`."""

    def __init__(
        self,
        computer: StepComputer,
        *,
        num_blocks: int,
        revision: str,
        mode: Mode,
        num_threads: int | None,
        activations: Activations = "plain",
    ) -> None:
        super().__init__(
            computer,
            num_blocks=num_blocks,
            max_blocks=computer.kv_cache.shape[2],
            is_elastic=True,
            revision=revision,
            mode=mode,
            activations=activations,
            init_step_thread=retain_freed_memory,
        )
        self._row_kernels: RowKernels | None = None
        products = list(_products(computer.model))
        experts = [each for each in products if each.share < 1.0]
        expert_weights = sum(each.weight.numel() for each in experts)
        self._threads = StepThreads(
            num_threads or torch.get_num_threads(),
            # one multiplication each per token
            sum(each.weight.numel() for each in products) - expert_weights,
            computer.model.dtype,
            has_custom_gemm=all(each.method.has_custom_gemm for each in products),
            expert_weights=expert_weights,
            expert_share=max((each.share for each in experts), default=0.0),
        )

    @classmethod
    def load(cls, model_dir: Path, options: LoadOptions, on_phase: OnPhase = ignore_phase) -> Self:
        """Loads a model. Raises CheckpointError for a bad checkpoint, ConfigError for a bad
        option.
        """
        config = read_config(model_dir)
        is_compressed = uses_compressed(options.weights, model_dir, _CPU, options.load_format)
        dtype = resolve_dtype(options.dtype, _CPU)
        kv_dtype = resolve_kv_dtype(options.kv_dtype, dtype, config, _CPU)
        kv_layout = kv_layout_of(config, kv_dtype, options.block_size)
        plan = None
        if not IS_INTERPRETED:  # the plan determines the layout of packed weights
            plan = compile_plan(config, dtype, kv_layout, is_compressed=is_compressed)
            if not cpu_host().is_compiled(plan):
                on_phase("compiling")
            compile_kernels(plan)
            on_phase("loading")
        given = options.kv_cache_bytes
        num_blocks = num_blocks_for(kv_layout, DEFAULT_KV_CACHE_BYTES if given is None else given)
        max_blocks = options.kv_ceiling(kv_layout, num_blocks)
        num_positions = options.context_tokens(config, max_blocks)
        model = empty_model(model_dir, config, dtype, _CPU, num_positions=num_positions)
        with open_weights(model_dir, config, model, options.load_format) as source:
            load_kv_scales(model, source.tensors, config, kv_layout)
            revision = _fill(model, source, is_compressed=is_compressed)
        finish_model(
            model, options.mode, is_compressed=is_compressed, activations=options.activations
        )
        kv_cache = allocate_kv_cache(kv_layout, max_blocks, _CPU)
        loaded = cls(
            StepComputer(model, kv_cache, kv_layout),
            num_blocks=num_blocks,
            revision=revision,
            mode=options.mode,
            activations=options.activations,
            num_threads=options.num_threads,
        )
        if plan is not None:
            # a ready worker has all its kernels compiled
            if not has_run(plan):
                on_phase("compiling")
            load_kernels(plan, lambda: _warm_up(loaded.computer))
            if options.has_row_kernels and options.activations == "plain":  # fused layers use it
                loaded._row_kernels = RowKernels(plan)
                loaded._row_kernels.start()
        return_freed_memory()  # of weights as the files have them, before they were packed
        return loaded

    async def close(self) -> None:
        if self._row_kernels is not None:
            await self._row_kernels.close()
        await super().close()

    async def read_kv(self, run: KvRun, out: memoryview) -> None:
        if out.nbytes <= MAX_INLINE_BYTES:
            self.computer.read_kv(run, out)
        else:
            await super().read_kv(run, out)

    async def write_kv(self, run: KvRun, payload: memoryview) -> None:
        if payload.nbytes <= MAX_INLINE_BYTES:
            self.computer.write_kv(run, payload)
        else:
            await super().write_kv(run, payload)

    def _resize_kv(self, num_blocks: int) -> None:
        if num_blocks == 0:
            return_freed_memory()

    def _run(self, inputs: StepInputs) -> StepOutput:
        self._threads.set_for(len(inputs.input_ids))
        return super()._run(inputs)


def _fill(model: Decoder, source: OpenedWeights, *, is_compressed: bool) -> str:
    """Fills the model and returns the revision. Processes of a host share one copy if possible."""
    destinations = model.weight_destinations()
    if not IS_INTERPRETED:
        mapped = map_weights(
            model,
            destinations,
            source.tensors,
            source.described,
            source.revision,
            weights_cache_dir(),
            is_compressed=is_compressed,
        )
        if mapped is not None:
            return mapped
    if is_compressed:
        compress_weights(model, destinations, source.tensors)
    else:
        load_weights(source.tensors, destinations)
    return source.revision()


@torch.inference_mode()
def _warm_up(computer: StepComputer) -> None:
    """Runs steps with enough rows for every kernel to use all threads."""
    rows = [cpu_host().few_rows + 1, 1]
    layout = computer.kv_layout
    step = idle_step(layout.block_size, rows, num_groups=len(layout.groups))
    hidden = computer.hidden(step)
    computer.model.logits(hidden[:1])
    computer.model.argmax_tokens(hidden[:1])


def _products(model: nn.Module) -> Iterator[MatmulModule]:
    return (each for each in model.modules() if isinstance(each, MatmulModule))
