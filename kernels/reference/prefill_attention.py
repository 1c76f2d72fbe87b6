"""Causal attention of runs of new tokens over their paged contexts: softmax(Q·Kᵀ·scale)·V."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.tiles import TILE, gather_kv, round_up, softmax_value

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

    kv_cache [2, num_kv_heads, num_blocks, block_size, D]; block_tables [S, max_blocks];
    cu_seqlens_q [S + 1]; context_lens [S] includes the new tokens, whose KV is stored already.
    A token sees the tokens up to itself. Bits equal those of `decode_attention` for each token.
    """
    out = torch.empty_like(query)
    starts = cu_seqlens_q.tolist()
    for index, context_len in enumerate(context_lens.tolist()):
        tokens = slice(starts[index], starts[index + 1])
        key, value = gather_kv(kv_cache, block_tables[index : index + 1], context_len)
        _attend(query[tokens], key[:, 0], value[:, 0], context_len, scale, out[tokens])
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
    rows = (query.float() * scale).view(num_tokens, num_kv_heads, group, head_dim).transpose(0, 1)
    step = max(MAX_SCORES // (round_up(context_len, TILE) * group), MIN_ROWS)
    for start in range(0, num_tokens, step):
        stop = min(start + step, num_tokens)
        positions = torch.arange(first_position + start, first_position + stop, device=key.device)
        visible = round_up(first_position + stop, TILE)
        for head in range(num_kv_heads):
            block = rows[head, start:stop].reshape(-1, head_dim)
            attended = _attend_rows(
                block,
                key[head, :visible],
                value[head, :visible],
                positions.repeat_interleave(group),
                first_position + start,
            )
            heads = slice(head * group, (head + 1) * group)
            out[start:stop, heads] = attended.view(stop - start, group, head_dim)


def _attend_rows(
    rows: Tensor, key: Tensor, value: Tensor, positions: Tensor, first_position: int
) -> Tensor:
    """rows [R, D] at `positions` [R], none before `first_position`; key, value [tokens, D]."""
    num_rows, head_dim = rows.shape
    padding = round_up(num_rows, MIN_ROWS) - num_rows
    if padding:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, padding))
        positions = torch.nn.functional.pad(positions, (0, padding))
    num_tiles = key.shape[0] // TILE
    scores = torch.bmm(
        rows.expand(num_tiles, -1, -1),
        key.view(num_tiles, TILE, head_dim).transpose(1, 2),
    )  # [num_tiles, R, TILE]
    first_tile = first_position // TILE  # every row sees all of the tiles before it
    token_index = torch.arange(first_tile * TILE, num_tiles * TILE, device=rows.device)
    masked = token_index.view(-1, 1, TILE) > positions.view(1, -1, 1)
    scores[first_tile:].masked_fill_(masked, float("-inf"))
    return softmax_value(scores.unsqueeze(0), value.unsqueeze(0))[0, :num_rows]
