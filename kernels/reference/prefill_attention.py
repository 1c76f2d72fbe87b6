"""Causal attention of runs of new tokens over their paged contexts: softmax(Q·Kᵀ·scale)·V."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.tiles import LOG2_E, TILE, gather_kv, round_up, softmax_value, visibility

# FP32 scores held at once: bounds memory at long contexts and stays within the caches.
MAX_SCORES = 1 << 18
MIN_ROWS = 16


def prefill_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """query [T, num_heads, D], sequences one after another -> as query; FP32 inside.

    kv_cache [2, num_blocks, num_kv_heads, block_size, D]; block_tables [S, max_blocks];
    cu_seqlens_q [S + 1]; context_lens [S] includes the new tokens, whose KV is stored already.
    A token sees the tokens up to itself. Bits equal those of `decode_attention` for each token.
    """
    out = torch.empty_like(query)
    starts = cu_seqlens_q.tolist()
    for index, context_len in enumerate(context_lens.tolist()):
        tokens = slice(starts[index], starts[index + 1])
        own = slice(index, index + 1)
        key, value = gather_kv(kv_cache, block_tables[own], context_lens[own])
        _attend(query[tokens], key[0], value[0], context_len, scale, out[tokens])
    return out


def _attend(
    query: Tensor, key: Tensor, value: Tensor, context_len: int, scale: float, out: Tensor
) -> None:
    """One sequence: query, out [Q, num_heads, D]; key, value [num_kv_heads, tokens, D] FP32."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[0]
    group = num_heads // num_kv_heads
    first_position = context_len - num_tokens
    # [num_kv_heads, Q, group, D]: a KV head's query heads become rows of one product.
    rows = query.float() * (scale * LOG2_E)
    rows = rows.view(num_tokens, num_kv_heads, group, head_dim).transpose(0, 1)
    step = max(MAX_SCORES // (round_up(context_len, TILE) * group), MIN_ROWS)
    for start in range(0, num_tokens, step):
        stop = min(start + step, num_tokens)
        num_tiles = -(-(first_position + stop) // TILE)
        limits = _limits(first_position + start, stop - start, group, num_tiles)
        limits = limits.to(query.device)
        for head in range(num_kv_heads):
            attended = _attend_rows(
                rows[head, start:stop].reshape(-1, head_dim),
                key[head, : num_tiles * TILE].view(num_tiles, TILE, head_dim),
                value[head, : num_tiles * TILE],
                limits,
            )
            heads = slice(head * group, (head + 1) * group)
            out[start:stop, heads] = attended.view(stop - start, group, head_dim)


def _limits(first_position: int, num_tokens: int, group: int, num_tiles: int) -> Tensor:
    """[last tiles, R, TILE]: all but the tiles before `first_position`, which every row sees.

    R = group rows for each token, padded to a multiple of MIN_ROWS by rows that see everything.
    """
    num_rows = round_up(num_tokens * group, MIN_ROWS)
    positions = first_position + torch.arange(num_rows) // group
    positions[num_tokens * group :] = num_tiles * TILE
    token_index = torch.arange(first_position // TILE * TILE, num_tiles * TILE)
    return visibility(token_index.view(-1, 1, TILE) <= positions.view(1, -1, 1))


def _attend_rows(rows: Tensor, key: Tensor, value: Tensor, limits: Tensor) -> Tensor:
    """rows [R, D]; key [num_tiles, TILE, D]; value [tokens, D] -> [R, D]."""
    num_rows = rows.shape[0]
    padding = limits.shape[1] - num_rows
    if padding:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, padding))
    scores = torch.bmm(rows.expand(key.shape[0], -1, -1), key.transpose(1, 2))
    tail = scores[key.shape[0] - limits.shape[0] :]
    torch.minimum(tail, limits, out=tail)
    return softmax_value(scores.unsqueeze(0), value.unsqueeze(0))[0, :num_rows]
