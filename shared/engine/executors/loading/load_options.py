"""The options of loading a model, of one process or of each rank. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from shared.config import (
    AttentionChoice,
    ExecutorChoice,
    ExpertKernels,
    ExpertSplit,
    ParkedWeights,
)
from shared.engine.executors.loading.kv_sizing import num_blocks_for
from shared.engine.model_config.model_config import ModelConfig
from shared.kv_layout import KvLayout
from shared.numerics import Activations, KvDtype, Mode

Phase = Literal["loading", "compiling"]
OnPhase = Callable[[Phase], None]  # called by the thread that loads


def ignore_phase(phase: Phase) -> None:
    """The OnPhase of a caller who shows none."""


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of loading a model.

    The KV cache has `kv_cache_bytes`: by default 1 GiB on the CPU, and on CUDA a share of the free
    memory after loading. It may grow to `kv_ceiling_bytes`; None: no more than at the start. If the
    worker `is_parked` it takes no memory before it gets a size. Its weights on CUDA are meanwhile
    where `parked_weights` says: in page-locked memory of the host, or still on the device. On CUDA
    all together takes at most `gpu_memory`, a size or a share of the device; empty: no limit.

    `kv_dtype`: see `resolve_kv_dtype`. A sequence has at most `max_context_tokens`; None: the
    model's limit.

    In the `mode` exact a token's bits depend neither on its batch nor on chunking, so a resumed
    response continues identically. On the CPU this always holds, at no cost; "fast" only declares
    the worker's KV usable by other hardware in that mode.
    The form in which sums of lanes cross ranks is set by `activations`; a worker of one rank rounds
    alike. Ranks share a model's experts as `experts` says, with the same bits. The forms of
    `weights` are in weight_form.py; in the exact mode all forms yield the same bits.
    `max_batch_tokens` and `max_sequences` bound the size of the steps.
    The `executor` plain launches every kernel of every step; auto replays graphs of decode steps
    where the device has them. The `attention` of prompts is by this project's kernels, or by cuDNN
    where it is asked for and can: see attention_backends. With the `expert_kernels` grouped torch
    computes the experts of many rows in the fast mode, where it can.
    With `has_row_kernels` the CPU's kernels for long prompts are compiled after loading; without
    them such prompts take more time, with the same bits.
    """

    dtype: str = "auto"
    kv_dtype: KvDtype = "auto"
    block_size: int = 16
    kv_cache_bytes: int | None = None
    kv_ceiling_bytes: int | None = None
    is_parked: bool = False
    gpu_memory: str = ""
    parked_weights: ParkedWeights = "host"
    max_context_tokens: int | None = None
    max_batch_tokens: int = 512
    max_sequences: int = 256
    num_threads: int | None = None
    mode: Mode = "exact"
    activations: Activations = "plain"
    experts: ExpertSplit = "auto"
    weights: str = "auto"
    load_format: str = "auto"  # "dummy": seeded weights, from config.json alone
    has_row_kernels: bool = False
    executor: ExecutorChoice = "auto"
    attention: AttentionChoice = "auto"
    expert_kernels: ExpertKernels = "auto"

    def kv_ceiling(self, kv_layout: KvLayout, num_blocks: int) -> int:
        """Returns the most blocks of a cache that has `num_blocks` at the start.
        Raises ConfigError.
        """
        if self.kv_ceiling_bytes is None:
            return num_blocks
        most = num_blocks_for(kv_layout, self.kv_ceiling_bytes, option="kv_ceiling_bytes")
        return max(num_blocks, most)

    def context_tokens(self, config: ModelConfig, max_blocks: int | None) -> int:
        """Returns the longest sequence: of the model, of the option, and of `max_blocks`."""
        limits = [config.max_position_embeddings]
        if self.max_context_tokens is not None:
            limits.append(self.max_context_tokens)
        if max_blocks is not None:
            limits.append(max_blocks * self.block_size)
        return min(limits)
