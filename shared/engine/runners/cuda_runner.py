"""A model on one CUDA device: binds its threads to it, sizes the KV cache by its free memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from kernels.device import on_triton_compile
from kernels.ops import SumLanes, Weight, product_row_counts
from shared.engine.kv_cache import allocate_kv_cache, num_blocks_for
from shared.engine.kv_quantisation.kv_dtype import resolve_kv_dtype
from shared.engine.kv_quantisation.kv_scales import load_kv_scales
from shared.engine.layers.latent_attention import LatentExpansion
from shared.engine.layers.linear import ProductModule
from shared.engine.layers.moe import ExpertLinear
from shared.engine.models.checkpoint_config import read_config
from shared.engine.runner import KvRun, StepInputs
from shared.engine.runners.cuda_device import CudaDevice
from shared.engine.runners.kv_sizing import num_blocks_in
from shared.engine.runners.model_loading import (
    LoadOptions,
    empty_model,
    finish_model,
    kv_layout_of,
    open_weights,
    resolve_dtype,
    set_mode,
)
from shared.engine.runners.model_runner import ModelExecutor, ModelRunner
from shared.engine.runners.warm_up import warm_up_steps
from shared.engine.weights.load import load_weights
from shared.engine.weights.shared_weights import compress_in_place
from shared.engine.weights.weight_form import uses_compressed
from shared.errors import ConfigError, NoCapacity


class CudaRunner(ModelRunner):
    """Create it with `load`. Steps and copies run on the device's default stream."""

    def __init__(
        self,
        executor: ModelExecutor,
        device: CudaDevice,
        *,
        num_blocks: int,
        revision: str,
        model_name: str,
        options: LoadOptions,
    ) -> None:
        super().__init__(
            executor,
            num_blocks=num_blocks,
            max_blocks=options.kv_ceiling(executor.kv_layout, num_blocks),
            is_elastic=False,
            model_name=model_name,
            revision=revision,
            mode=options.mode,
            activations=options.activations,
            clock=options.clock,
            init_step_thread=device.bind,
            init_copy_thread=device.bind,
        )
        self._device = device
        if device.tensors_on.type == "cuda":
            on_triton_compile(self._budget.compiling)

    @classmethod
    def load(cls, model_dir: Path, options: LoadOptions, device: CudaDevice) -> Self:
        """Binds the calling thread. Kernels are compiled while the weights are read: they do not
        depend on values. Raises CheckpointError for a bad checkpoint, ConfigError for a bad option
        or for a device that cannot run kernels or has no memory for KV.
        """
        device.bind()
        device.check_kernels()  # before reading the model, which takes minutes
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
        model = empty_model(model_dir, config, dtype, target, num_positions=num_positions)
        with (
            open_weights(model_dir, config, model, options.load_format) as source,
            ThreadPoolExecutor(1, "compile", initializer=device.bind) as thread,
        ):
            set_mode(model, options.mode)
            load_kv_scales(model, source.tensors, kv_layout)
            one_block = allocate_kv_cache(kv_layout, 1, target)
            early = ModelExecutor(model, one_block, kv_layout)
            # The memory of quantised weights is no operand before `finish_model`.
            compiled = None if config.is_quantised else thread.submit(warm_up, early, options)
            load_weights(source.tensors, model.weight_destinations())
            revision = source.revision()
            if compiled is not None:
                compiled.result()
        if is_compressed:
            compress_in_place(model, model.weight_destinations())
        finish_model(
            model, options.mode, is_compressed=is_compressed, activations=options.activations
        )
        device.release_cached()
        executor = ModelExecutor(
            model, one_block, kv_layout, check_thread=device.check_bound, clock=options.clock
        )
        warm_up(executor, options)
        if num_blocks is None:
            num_blocks = num_blocks_in(device.memory(), kv_layout)
        if options.is_parked:
            executor.kv_cache = allocate_kv_cache(kv_layout, 0, target)
        else:
            executor.kv_cache = allocate_kv_cache(kv_layout, num_blocks, target)
            warm_up(executor, options)  # compiles kernels for the strides of a large cache
        return cls(
            executor,
            device,
            num_blocks=num_blocks,
            revision=revision,
            model_name=options.served_name(model_dir),
            options=options,
        )

    def _resize_kv(self, num_blocks: int) -> None:
        """Only the executor refers to the cache, so its memory is free once it has another one."""
        executor, target = self.executor, self._device.tensors_on
        executor.kv_cache = allocate_kv_cache(self.kv_layout, 0, target)
        self._device.release_cached()
        if num_blocks == 0:
            return
        try:
            executor.kv_cache = allocate_kv_cache(self.kv_layout, num_blocks, target)
        except torch.OutOfMemoryError:
            report = self._device.memory()
            raise NoCapacity(
                f"{num_blocks * self.kv_layout.block_bytes >> 20} MiB of KV do not fit the "
                f"{report.free >> 20} MiB that are free on cuda:{self._device.index}"
            ) from None

    def step_logits(self, inputs: StepInputs) -> Tensor:
        """Binds the calling thread."""
        self._device.bind()
        return super().step_logits(inputs)


def warm_up(executor: ModelExecutor, options: LoadOptions) -> None:
    """Launches every kernel that a step or a push can need, and runs the largest steps."""
    kv_layout = executor.kv_layout
    modules = list(executor.model.modules())
    weights: list[tuple[Weight, SumLanes | None]] = [
        (each.weight, each.lanes)
        for each in modules
        if isinstance(each, ProductModule) and not isinstance(each, ExpertLinear)
    ]
    for each in modules:
        if isinstance(each, LatentExpansion):
            heads = (weight for weight in each.matrices() if isinstance(weight, Tensor))
            weights += [(weight.flatten(0, 1), None) for weight in heads]
    row_counts = product_row_counts(
        weights,
        executor.model.dtype,
        options.max_batch_tokens,
        is_batch_invariant=options.mode == "exact",
    )
    for step in warm_up_steps(
        kv_layout.block_size,
        row_counts,
        max_batch_tokens=options.max_batch_tokens,
        max_sequences=options.max_sequences,
        vocab_size=executor.model.config.vocab_size,
        num_groups=len(kv_layout.groups),
    ):
        executor.run(step)
    wire = memoryview(bytearray(kv_layout.group_bytes_per_token(0)))
    executor.read_kv(KvRun([0], 0, 1), wire)
    executor.write_kv(KvRun([0], 0, 1), wire)
