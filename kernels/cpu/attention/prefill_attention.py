"""Attention of runs of new tokens over their paged contexts, causal: softmax(q·Kᵀ·scale)·V."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.attention.amx_attention import amx_attention, can_attend_on_amx
from kernels.cpu.attention.dequantized_attention import dequantized_attention
from kernels.cpu.attention.vector_attention import vector_attention


def prefill_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
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
    """Computes kernels.reference.prefill_attention with the bits of `decode_attention`."""
    if kv_scales is not None or kv_cache.dtype == torch.float8_e4m3fn:
        return dequantized_attention(
            *(query, kv_cache, block_tables, cu_seqlens_q.diff(), context_lens, scale),
            kv_scales=kv_scales,
            lower=lower,
            softcap=softcap,
            sinks=sinks,
        )[..., :value_dim]
    attend = amx_attention if can_attend_on_amx(kv_cache) else vector_attention
    return attend(
        *(query, kv_cache, block_tables, cu_seqlens_q.diff(), context_lens, scale),
        lower=lower,
        softcap=softcap,
        sinks=sinks,
    )[..., :value_dim]
