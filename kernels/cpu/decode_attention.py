"""Attention of one new token per sequence over its paged context: softmax(q·Kᵀ·scale)·V.

One task a sequence and KV head: the query heads that share it read each key and value once.
A score is one chain of fused multiply-adds over the head's dimensions, an output element one over
each SEGMENT of keys: the very chains of oneDNN's FP32 product, so that `prefill_attention` gives
the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from kernels.cpu.amx_attention import amx_attention, can_attend_on_amx
from kernels.cpu.compiled import compiled
from kernels.cpu.lanes import LANES, LOG2_E, array, fma, join_lanes, narrow, widen
from kernels.cpu.softmax import largest_score, weigh_scores

TILE = LANES  # keys whose scores are computed together
SEGMENT = 512  # keys whose values are summed in one chain; a multiple of TILE

_f32 = np.float32


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

    kv_cache [2, num_blocks, num_kv_heads, block_size, D]; block_tables [S, B]; context_lens [S].
    A token sees the last `window` tokens, itself among them; `softcap` c turns a score x into
    c · tanh(x / c).
    """
    num_seqs, num_heads, head_dim = query.shape
    if can_attend_on_amx(kv_cache):
        return amx_attention(
            query,
            kv_cache,
            block_tables,
            torch.ones_like(context_lens),
            context_lens,
            scale,
            window=window,
            softcap=softcap,
        )
    num_kv_heads = kv_cache.shape[2]
    grouped = query.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = torch.empty_like(grouped, memory_format=torch.contiguous_format)
    key, value = kv_cache.unbind(0)
    _decode_attention(
        array(grouped),
        array(key),
        array(value),
        block_tables.numpy(),
        context_lens.numpy(),
        _f32(scale if softcap is not None else scale * LOG2_E),
        0 if window is None else window,
        _f32(0.0 if softcap is None else softcap),
        array(out),
    )
    return out.view(num_seqs, num_heads, head_dim)


@compiled(parallel=True)
def _decode_attention(
    query: Any,  # [S, H, G, D]
    key: Any,  # [num_blocks, H, block_size, D]
    value: Any,
    block_tables: Any,
    context_lens: Any,
    scale: Any,
    window: Any,  # 0: none
    softcap: Any,  # 0: none
    out: Any,  # [S, H, G, D]
) -> None:
    num_seqs, num_kv_heads, group, head_dim = query.shape
    for item in prange(num_seqs * num_kv_heads):
        seq, head = item // num_kv_heads, item % num_kv_heads
        end = context_lens[seq]
        start = max(0, end - window) if window else 0
        first = start // TILE * TILE
        num_tiles = (end - first + TILE - 1) // TILE
        rows = np.empty((group, head_dim), _f32)
        for g in range(group):
            for d in range(head_dim):
                rows[g, d] = widen(query[seq, head, g, d]) * scale
        weights = np.zeros((group, num_tiles, TILE), _f32)
        _scores(rows, key, block_tables[seq], head, first, end, weights)
        lanes = np.zeros((group, LANES), _f32)
        for g in range(group):
            top = largest_score(weights, g, start - first, end - first, softcap)
            weigh_scores(weights, g, start - first, end - first, top, lanes, g)
        sums = np.zeros((group, head_dim), _f32)
        _weighted_values(weights, value, block_tables[seq], head, first, end, sums)
        for g in range(group):
            total = join_lanes(lanes[g])
            for d in range(head_dim):
                out[seq, head, g, d] = narrow(sums[g, d] / total, out.dtype)


@njit(nogil=True, inline="always")
def add_products(factors: Any, rows: Any, first: int, sums: Any) -> None:
    """sums += factors[i] · rows[i] for i in first .. first + 3, one after the other.

    Four at once, so that sums are read and written once for them.
    """
    a, b, c, d = factors[first], factors[first + 1], factors[first + 2], factors[first + 3]
    row_a, row_b, row_c, row_d = rows[first], rows[first + 1], rows[first + 2], rows[first + 3]
    for i in range(sums.shape[0]):
        x = fma(b, row_b[i], fma(a, row_a[i], sums[i]))
        sums[i] = fma(d, row_d[i], fma(c, row_c[i], x))


@compiled()
def _scores(
    rows: Any, key: Any, block_table: Any, head: int, first: int, end: int, scores: Any
) -> None:
    """scores [G, tiles, TILE] of the keys from `first` on; those from `end` on hold no number."""
    group, head_dim = rows.shape
    block_size = key.shape[2]
    tile = np.zeros((head_dim, TILE), _f32)  # transposed: a lane a key
    for index in range(scores.shape[1]):
        for j in range(min(TILE, end - first - index * TILE)):
            token = first + index * TILE + j
            block, offset = block_table[token // block_size], token % block_size
            for d in range(head_dim):
                tile[d, j] = widen(key[block, head, offset, d])
        for g in range(group):
            for d in range(0, head_dim - head_dim % 4, 4):
                add_products(rows[g], tile, d, scores[g, index])
            for d in range(head_dim - head_dim % 4, head_dim):
                for j in range(TILE):
                    scores[g, index, j] = fma(rows[g, d], tile[d, j], scores[g, index, j])


@compiled()
def _weighted_values(
    weights: Any, value: Any, block_table: Any, head: int, first: int, end: int, sums: Any
) -> None:
    """sums [G, D] += weights · values, a chain for each SEGMENT of absolute positions."""
    group, head_dim = sums.shape
    block_size = value.shape[2]
    tile = np.empty((TILE, head_dim), _f32)
    chain = np.zeros((group, head_dim), _f32)
    for index in range(weights.shape[1]):
        token = first + index * TILE
        num_tokens = min(TILE, end - token)
        for j in range(num_tokens):
            block, offset = block_table[(token + j) // block_size], (token + j) % block_size
            for d in range(head_dim):
                tile[j, d] = widen(value[block, head, offset, d])
        for g in range(group):
            for j in range(0, num_tokens - num_tokens % 4, 4):
                add_products(weights[g, index], tile, j, chain[g])
            for j in range(num_tokens - num_tokens % 4, num_tokens):
                for d in range(head_dim):
                    chain[g, d] = fma(weights[g, index, j], tile[j, d], chain[g, d])
        if (token + TILE) % SEGMENT == 0 or token + TILE >= end:
            for g in range(group):
                for d in range(head_dim):
                    sums[g, d] += chain[g, d]
                    chain[g, d] = _f32(0.0)
