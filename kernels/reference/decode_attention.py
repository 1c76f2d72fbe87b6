"""Attention of one new token per sequence over its paged context: softmax(q·Kᵀ·scale)·V."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.tiles import (
    ROW_MULTIPLE,
    TILE,
    gather_kv,
    round_up,
    score_factor,
    skip_before_window,
    softcap_,
    softmax_value,
    visibility,
)


def decode_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """query [S, num_heads, D] -> [S, num_heads, D] in its dtype; FP32 inside.

    kv_cache [2, num_blocks, num_kv_heads, block_size, D]; block_tables [S, max_blocks] padded with
    any valid block; context_lens [S] includes the new token, whose KV is stored already.
    Everything is padded to the longest context: callers group sequences of like length.
    Only the last `window` tokens are seen; `softcap` turns a score s into cap · tanh(s / cap).
    """
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads = kv_cache.shape[2]
    group = num_heads // num_kv_heads
    num_rows = round_up(group, ROW_MULTIPLE)
    first_tile = 0
    if window is not None:
        first_visible = max(int(context_lens.min()) - window, 0)
        first_tile, block_tables, context_lens = skip_before_window(
            block_tables, context_lens, first_visible, kv_cache.shape[3]
        )
    key, value = gather_kv(kv_cache, block_tables, context_lens)
    num_tokens = key.shape[2]
    num_tiles = num_tokens // TILE
    batch = num_kv_heads * num_seqs

    grouped = query.view(num_seqs, num_kv_heads, 1, group, head_dim)
    rows = query.new_zeros(
        (num_seqs, num_kv_heads, num_tiles, num_rows, head_dim), dtype=torch.float32
    )
    rows[:, :, :, :group] = grouped.float() * score_factor(scale, softcap)
    scores = torch.bmm(
        rows.view(batch * num_tiles, num_rows, head_dim),
        key.reshape(batch * num_tiles, TILE, head_dim).transpose(1, 2),
    )
    softcap_(scores, softcap)
    token_index = torch.arange(num_tokens, device=query.device)
    is_visible = token_index < context_lens.unsqueeze(1)
    if window is not None:
        is_visible &= token_index >= context_lens.unsqueeze(1) - window
    limits = visibility(is_visible)  # [S, tokens]
    scores = scores.view(num_seqs, num_kv_heads, num_tiles, num_rows, TILE)
    torch.minimum(scores, limits.view(num_seqs, 1, num_tiles, 1, TILE), out=scores)
    out = softmax_value(
        scores.view(batch, num_tiles, num_rows, TILE),
        value.reshape(batch, num_tokens, head_dim),
        first_tile,
    )
    out = out.view(num_seqs, num_kv_heads, num_rows, head_dim)[:, :, :group]
    return out.to(query.dtype).reshape(num_seqs, num_heads, head_dim)
