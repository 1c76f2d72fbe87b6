"""Attention of one new token per sequence over its paged context: softmax(q·Kᵀ·scale)·V."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.prefill_attention import prefill_attention


def decode_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    lower: Tensor | None = None,
    softcap: float | None = None,
    kv_scales: Tensor | None = None,
    value_dim: int | None = None,
    sinks: Tensor | None = None,
    is_batch_invariant: bool = False,
) -> Tensor:
    """query [S, num_heads, D] -> [S, num_heads, D] in its dtype; computed in FP32.

    A prefill of one token for each sequence; the other arguments as in `prefill_attention`.
    """
    single = torch.arange(len(query) + 1)
    return prefill_attention(
        query,
        kv_cache,
        block_tables,
        single,
        context_lens,
        scale,
        lower=lower,
        softcap=softcap,
        kv_scales=kv_scales,
        value_dim=value_dim,
        sinks=sinks,
        is_batch_invariant=is_batch_invariant,
    )
