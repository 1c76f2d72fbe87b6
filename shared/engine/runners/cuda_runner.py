"""A model on one CUDA device: binds its threads to it, sizes the KV cache by its free memory."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from torch import Tensor

from shared.engine.kv_cache import allocate_kv_cache, num_blocks_for
from shared.engine.models.checkpoint_config import read_config
from shared.engine.runner import StepInputs
from shared.engine.runners.cuda_device import CudaDevice
from shared.engine.runners.kv_sizing import num_blocks_in
from shared.engine.runners.model_loading import (
    LoadOptions,
    empty_model,
    finish_model,
    kv_format_of,
    open_weights,
    resolve_dtype,
)
from shared.engine.runners.model_runner import ModelExecutor, ModelRunner
from shared.engine.runners.warm_up import idle_step
from shared.engine.weights.load import load_weights
from shared.engine.weights.shared_weights import compress_in_place
from shared.engine.weights.weight_form import uses_compressed

# Triton kernels start at a window's first token; earlier blocks are held as long as on the CPU.
_ATTENTION_SEGMENT = 512


class CudaRunner(ModelRunner):
    """Create it with `load`. Steps and copies run on the device's default stream."""

    def __init__(
        self,
        executor: ModelExecutor,
        device: CudaDevice,
        *,
        revision: str,
        model_name: str,
        options: LoadOptions,
    ) -> None:
        super().__init__(
            executor,
            model_name=model_name,
            revision=revision,
            mode=options.mode,
            attention_segment=_ATTENTION_SEGMENT,
            clock=options.clock,
            init_step_thread=device.bind,
            init_copy_thread=device.bind,
        )
        self._device = device

    @classmethod
    def load(cls, model_dir: Path, options: LoadOptions, device: CudaDevice) -> Self:
        """Binds the calling thread. Raises CheckpointError for a bad checkpoint, ConfigError for a
        bad option or for a device that cannot run kernels or has no memory for KV.
        """
        device.bind()
        device.check_kernels()  # before reading the model, which takes minutes
        target, config = device.tensors_on, read_config(model_dir)
        is_compressed = uses_compressed(options.weights, model_dir, target, options.load_format)
        kv_format = kv_format_of(config, resolve_dtype(options.dtype, target), options.block_size)
        num_positions, num_blocks = config.max_position_embeddings, None
        if options.kv_cache_bytes is not None:
            num_blocks = num_blocks_for(kv_format, options.kv_cache_bytes)
            num_positions = min(num_positions, num_blocks * kv_format.block_size)
        model = empty_model(model_dir, config, kv_format.dtype, target, num_positions=num_positions)
        with open_weights(model_dir, config, model, options.load_format) as source:
            load_weights(source.tensors, model.weight_destinations())
            revision = source.revision()
        if is_compressed:
            compress_in_place(model, model.weight_destinations())
        finish_model(model, options.mode, is_compressed=is_compressed)
        device.release_cached()
        executor = ModelExecutor(
            model,
            allocate_kv_cache(kv_format, 1, target),
            kv_format,
            check_thread=device.check_bound,
        )
        _warm_up(executor, options)
        if num_blocks is None:
            num_blocks = num_blocks_in(device.memory(), kv_format)
        executor.kv_cache = allocate_kv_cache(kv_format, num_blocks, target)
        _warm_up(executor, options)  # compiles kernels for the strides of a large cache
        return cls(
            executor,
            device,
            revision=revision,
            model_name=options.served_name(model_dir),
            options=options,
        )

    def step_logits(self, inputs: StepInputs) -> Tensor:
        """Binds the calling thread."""
        self._device.bind()
        return super().step_logits(inputs)


def _warm_up(executor: ModelExecutor, options: LoadOptions) -> None:
    """Runs the largest steps: one prompt, and the maximum of sequences that all sample."""
    block_size = executor.kv_format.block_size
    executor.run(idle_step(block_size, [options.max_batch_tokens]))
    num_rows = min(options.max_sequences, options.max_batch_tokens)
    for temperature in (0.0, 1.0):
        executor.run(idle_step(block_size, [1] * num_rows, temperature=temperature))
