"""Attention of one new token per sequence over its paged context: softmax(q·Kᵀ·scale)·V."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.tiles import (
    LOG2_E,
    ROW_MULTIPLE,
    TILE,
    gather_kv,
    round_up,
    softmax_value,
    visibility,
)


def decode_attention(
    query: Tensor, kv_cache: Tensor, block_tables: Tensor, context_lens: Tensor, scale: float
) -> Tensor:
    """query [S, num_heads, D] -> [S, num_heads, D] in its dtype; FP32 inside.

    kv_cache [2, num_blocks, num_kv_heads, block_size, D]; block_tables [S, max_blocks] padded with
    any valid block; context_lens [S] includes the new token, whose KV is stored already.
    Everything is padded to the longest context: callers group sequences of like length.
    """
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads = kv_cache.shape[2]
    group = num_heads // num_kv_heads
    num_rows = round_up(group, ROW_MULTIPLE)
    key, value = gather_kv(kv_cache, block_tables, context_lens)
    num_tokens = key.shape[2]
    num_tiles = num_tokens // TILE
    batch = num_kv_heads * num_seqs

    grouped = query.view(num_seqs, num_kv_heads, 1, group, head_dim)
    rows = query.new_zeros(
        (num_seqs, num_kv_heads, num_tiles, num_rows, head_dim), dtype=torch.float32
    )
    rows[:, :, :, :group] = grouped.float() * (scale * LOG2_E)
    scores = torch.bmm(
        rows.view(batch * num_tiles, num_rows, head_dim),
        key.reshape(batch * num_tiles, TILE, head_dim).transpose(1, 2),
    )
    token_index = torch.arange(num_tokens, device=query.device)
    limits = visibility(token_index < context_lens.unsqueeze(1))  # [S, tokens]
    scores = scores.view(num_seqs, num_kv_heads, num_tiles, num_rows, TILE)
    torch.minimum(scores, limits.view(num_seqs, 1, num_tiles, 1, TILE), out=scores)
    out = softmax_value(
        scores.view(batch, num_tiles, num_rows, TILE), value.reshape(batch, num_tokens, head_dim)
    )
    out = out.view(num_seqs, num_kv_heads, num_rows, head_dim)[:, :, :group]
    return out.to(query.dtype).reshape(num_seqs, num_heads, head_dim)
