"""Compiles the kernels of a worker's steps before it is ready, without running a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels import ops
from kernels.compile_on_meta import compiling_on_meta
from kernels.device import IS_INTERPRETED
from kernels.ops import (
    SumLanes,
    Weight,
    copy_blocks,
    gather_blocks,
    gemm_row_counts,
    scatter_blocks,
)
from shared.engine.executors.cuda.meta_model import META, distinct_layers, meta_model
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.loading.warm_up import COPIES, batch_sizes, warm_up_steps
from shared.engine.executors.step_computer import StepComputer
from shared.engine.kv.kv_cache import allocate_kv_cache
from shared.engine.layers.latent_attention import LatentExpansion
from shared.engine.layers.linear import MatmulModule
from shared.engine.layers.moe import ExpertLinear
from shared.engine.models.decoder import Decoder
from shared.engine.models.device_step import device_step
from shared.engine.sampling.hidden_state_outputs import rows_at_once
from shared.engine.step import StepInputs
from shared.kv_layout import KvLayout


class StepKernels:
    """All kernels that the layers, the head, plain sampling and pushes of KV can need with a cache
    of `num_blocks`. Layers that launch the same kernels count once; weights may be unset.

    `computer` gives inputs and caches of steps. `twin` has only `layers` of its model.
    """

    def __init__(
        self, model: Decoder, kv_layout: KvLayout, num_blocks: int, options: LoadOptions
    ) -> None:
        """The model may change afterwards."""
        self.options = options
        cache = allocate_kv_cache(kv_layout, num_blocks, META)
        self.computer = StepComputer(model, cache, kv_layout)
        self.layers = distinct_layers(model, self.computer.kind_of_layer)
        self.twin = meta_model(model, self.layers)

    def row_counts(self) -> list[int]:
        """Returns numbers of tokens that between them need every kernel."""
        most = self.options.max_batch_tokens
        changes = gemm_row_counts(
            list(_multiplied(self.twin)),
            self.twin.norm.weight.dtype,
            most,
            is_batch_invariant=self.options.mode == "exact",
        )
        return sorted({*changes, 1, most, *batch_sizes(most)})

    def steps(self, row_counts: Sequence[int]) -> Iterator[StepInputs]:
        layout = self.computer.kv_layout
        return warm_up_steps(
            layout.block_size,
            row_counts,
            max_batch_tokens=self.options.max_batch_tokens,
            max_sequences=self.options.max_sequences,
            num_groups=len(layout.groups),
        )

    def scored(self, row_counts: Sequence[int]) -> Iterator[Tensor]:
        """Yields hidden states of tokens of a prompt whose log-probabilities are requested: more
        than those that sample.
        """
        config, norm = self.twin.config, self.twin.norm.weight
        most = rows_at_once(config.vocab_size)
        for count in row_counts if config.has_head else ():
            if count <= most:
                yield torch.empty((count, config.hidden_size), dtype=norm.dtype, device=META)


@torch.inference_mode()
def compile_kernels(kernels: StepKernels, init_thread: Callable[[], None] = lambda: None) -> None:
    """Compiles and loads them on the thread's device; those in Triton's cache are loaded.
    `init_thread` makes the device that of a thread which compiles.
    """
    if IS_INTERPRETED or not ops.HAS_TRITON:  # nothing is compiled
        return
    computer, layers = kernels.computer, kernels.layers
    slots, row_counts = computer.kv_slots(), kernels.row_counts()
    with compiling_on_meta(init_thread):
        for step in kernels.steps(row_counts):
            inputs = computer.device_inputs(step, samples_on_device=step.sampling.is_plain)
            own = replace(inputs, attention=tuple(inputs.attention[layer] for layer in layers))
            device_step(kernels.twin, [slots[layer] for layer in layers], own)
        for hidden in kernels.scored(row_counts):
            kernels.twin.logits(hidden)
        _compile_copies(computer.kv_cache)


def _multiplied(twin: Decoder) -> Iterator[tuple[Weight, SumLanes | None]]:
    """Returns the weights of GEMMs whose kernels depend on the number of rows."""
    for each in twin.modules():
        if isinstance(each, MatmulModule) and not isinstance(each, ExpertLinear):
            yield each.weight, each.lanes
        elif isinstance(each, LatentExpansion):
            for weight in each.matrices():
                if isinstance(weight, Tensor):
                    yield weight.flatten(0, 1), None


def _compile_copies(cache: Tensor) -> None:
    """Copies of blocks, and those between the cache and the wire."""
    for num_copies in COPIES:
        copy_blocks(cache, *torch.empty(2, num_copies, dtype=torch.int64, device=META))
    num_layers, planes, _, heads, _, dim = cache.shape
    wire = torch.empty((num_layers, planes, 1, heads, dim), dtype=cache.dtype, device=META)
    table = torch.empty(1, dtype=torch.int64, device=META)
    for move in (gather_blocks, scatter_blocks):
        move(cache, table, 0, 1, wire)
