"""Causal attention of runs of new tokens over their paged contexts: softmax(Q·Kᵀ·scale)·V."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.tiles import (
    TILE,
    gather_kv,
    round_up,
    score_factor,
    skip_before_window,
    softcap_,
    softmax_value,
    visibility,
)

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
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """query [T, num_heads, D], sequences one after another -> as query; FP32 inside.

    kv_cache [2, num_blocks, num_kv_heads, block_size, D]; block_tables [S, max_blocks];
    cu_seqlens_q [S + 1]; context_lens [S] includes the new tokens, whose KV is stored already.
    A token sees the tokens up to itself, or the last `window` of them; `softcap` turns a score s
    into cap · tanh(s / cap). Bits equal those of `decode_attention` for each token.
    """
    out = torch.empty_like(query)
    starts = cu_seqlens_q.tolist()
    for index, context_len in enumerate(context_lens.tolist()):
        tokens = slice(starts[index], starts[index + 1])
        first_visible = _first_visible(context_len - (tokens.stop - tokens.start), window)
        first_tile, table, length = skip_before_window(
            block_tables[index : index + 1],
            context_lens[index : index + 1],
            first_visible,
            kv_cache.shape[3],
        )
        key, value = gather_kv(kv_cache, table, length)
        _attend(
            query[tokens],
            key[0],
            value[0],
            int(length),
            scale,
            out[tokens],
            first_tile=first_tile,
            window=window,
            softcap=softcap,
        )
    return out


def _first_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(position + 1 - window, 0)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context_len: int,
    scale: float,
    out: Tensor,
    *,
    first_tile: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """One sequence: query, out [Q, num_heads, D]; key, value [num_kv_heads, tokens, D] FP32.

    `context_len` counts from `first_tile` on, where key and value begin.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[0]
    group = num_heads // num_kv_heads
    first_position = context_len - num_tokens
    # [num_kv_heads, Q, group, D]: a KV head's query heads become rows of one product.
    rows = query.float() * score_factor(scale, softcap)
    rows = rows.view(num_tokens, num_kv_heads, group, head_dim).transpose(0, 1)
    step = max(MAX_SCORES // (round_up(context_len, TILE) * group), MIN_ROWS)
    for start in range(0, num_tokens, step):
        stop = min(start + step, num_tokens)
        first = first_position + start
        tiles = range(_first_visible(first, window) // TILE, -(-(first_position + stop) // TILE))
        limits = _limits(first, stop - start, group, tiles, window).to(query.device)
        tokens = slice(tiles.start * TILE, tiles.stop * TILE)
        for head in range(num_kv_heads):
            attended = _attend_rows(
                rows[head, start:stop].reshape(-1, head_dim),
                key[head, tokens].view(len(tiles), TILE, head_dim),
                value[head, tokens],
                limits,
                first_tile + tiles.start,
                softcap,
            )
            heads = slice(head * group, (head + 1) * group)
            out[start:stop, heads] = attended.view(stop - start, group, head_dim)


def _limits(
    first_position: int, num_tokens: int, group: int, tiles: range, window: int | None
) -> Tensor:
    """[last tiles, R, TILE]: without a window all but those tiles that every row sees.

    R = group rows for each token, padded to a multiple of MIN_ROWS by rows of the last position.
    """
    num_rows = round_up(num_tokens * group, MIN_ROWS)
    positions = first_position + torch.arange(num_rows) // group
    positions[num_tokens * group :] = tiles.stop * TILE - 1
    positions = positions.view(1, -1, 1)
    first_tile = first_position // TILE if window is None else tiles.start
    token_index = torch.arange(first_tile * TILE, tiles.stop * TILE).view(-1, 1, TILE)
    is_visible = token_index <= positions
    if window is not None:
        is_visible &= token_index > positions - window
    return visibility(is_visible)


def _attend_rows(
    rows: Tensor,
    key: Tensor,
    value: Tensor,
    limits: Tensor,
    first_tile: int,
    softcap: float | None,
) -> Tensor:
    """rows [R, D]; key [num_tiles, TILE, D]; value [tokens, D] -> [R, D]."""
    num_rows = rows.shape[0]
    padding = limits.shape[1] - num_rows
    if padding:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, padding))
    scores = torch.bmm(rows.expand(key.shape[0], -1, -1), key.transpose(1, 2))
    softcap_(scores, softcap)
    tail = scores[key.shape[0] - limits.shape[0] :]
    torch.minimum(tail, limits, out=tail)
    return softmax_value(scores.unsqueeze(0), value.unsqueeze(0), first_tile)[0, :num_rows]
