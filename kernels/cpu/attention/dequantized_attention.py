"""Attention over an FP8 cache: each sequence's context, dequantized to FP32 for the FP32 kernel.

Values are those of the reference, and no row's bits depend on another's, nor on where runs are
cut: the products of the library that the reference multiplies with depend on the number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.attention.vector_attention import vector_attention


def dequantized_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_lens: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    kv_scales: Tensor | None,
    lower: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes `vector_attention` over a quantized cache, of which one sequence is dequantized at
    a time: the memory is that of one context.
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    block_size, start = kv_cache.shape[3], 0
    for index, (num_tokens, context_len) in enumerate(
        zip(query_lens.tolist(), context_lens.tolist(), strict=True)
    ):
        rows = slice(start, start + num_tokens)
        start = rows.stop
        if not num_tokens:
            continue
        bounds = None if lower is None else lower[rows]
        first = 0 if bounds is None else int(bounds[0]) // block_size
        blocks = block_tables[index, first : -(-context_len // block_size)]
        table = torch.cat((blocks.new_zeros(first), torch.arange(len(blocks))))
        attended = vector_attention(
            query[rows].float(),
            _dequantized(kv_cache, kv_scales, blocks),
            table[None],
            query_lens[index : index + 1],
            context_lens[index : index + 1],
            scale,
            lower=bounds,
            softcap=softcap,
            sinks=sinks,
        )
        out[rows] = attended
    return out


def _dequantized(kv_cache: Tensor, kv_scales: Tensor | None, blocks: Tensor) -> Tensor:
    """FP32 [planes, len(blocks), num_kv_heads, block_size, D]"""
    stored = kv_cache.view(torch.uint8) if kv_cache.element_size() == 1 else kv_cache
    found = stored.index_select(1, blocks.long()).view(kv_cache.dtype).float()
    if kv_scales is None:
        return found
    return found.mul_(kv_scales[: len(found), None, :, None, None])
