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
from numba import prange
from torch import Tensor

from kernels.cpu.amx_attention import amx_attention, can_attend_on_amx
from kernels.cpu.compiled import compiled
from kernels.cpu.lanes import (
    LANES,
    LOG2_E,
    SIDE,
    add_chains,
    array,
    join_lanes,
    narrow,
    transpose_words,
    widen,
)
from kernels.cpu.softmax import largest_score, weigh_scores
from kernels.reference.decode_attention import decode_attention as reference_decode_attention

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
    kv_scales: Tensor | None = None,
    is_batch_invariant: bool = False,
) -> Tensor:
    """query [S, num_heads, D] -> [S, num_heads, D] in its dtype; FP32 inside.

    kv_cache [2, num_blocks, num_kv_heads, block_size, D]; block_tables [S, B]; context_lens [S].
    A token sees the last `window` tokens, itself among them; `softcap` c turns a score x into
    c · tanh(x / c).
    """
    if kv_scales is not None or kv_cache.dtype == torch.float8_e4m3fn:
        return reference_decode_attention(
            query,
            kv_cache,
            block_tables,
            context_lens,
            scale,
            window=window,
            softcap=softcap,
            kv_scales=kv_scales,
        )
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


@compiled()
def _scores(
    rows: Any, key: Any, block_table: Any, head: int, first: int, end: int, scores: Any
) -> None:
    """scores [G, tiles, TILE] of the keys from `first` on; those from `end` on hold no number."""
    group, head_dim = rows.shape
    keys = np.zeros((TILE, head_dim), _f32)
    tile = np.empty((head_dim, TILE), _f32)  # transposed: a lane a key
    for index in range(scores.shape[1]):
        token = first + index * TILE
        _gather(key, block_table, head, token, min(TILE, end - token), keys)
        _transpose(keys, tile)
        sums = scores.ctypes.data + index * TILE * 4, scores.shape[1] * TILE * 4
        factors = rows.ctypes.data, head_dim * 4
        _add_64(sums, factors, (tile.ctypes.data, TILE * 4), head_dim, group)


@compiled()
def _gather(
    plane: Any, block_table: Any, head: int, token: int, num_tokens: int, rows: Any
) -> None:
    """rows [num_tokens, D] = a head's keys or values from `token` on; a block's are one piece."""
    _, num_heads, block_size, head_dim = plane.shape
    source, target = plane.reshape(plane.size), rows.reshape(rows.size)
    num_done = 0
    while num_done < num_tokens:
        block_id = block_table[(token + num_done) // block_size]
        offset = (token + num_done) % block_size
        count = min(block_size - offset, num_tokens - num_done)
        start = ((block_id * num_heads + head) * block_size + offset) * head_dim
        _widen_all(source[start : start + count * head_dim], target[num_done * head_dim :])
        num_done += count


@compiled()
def _widen_all(source: Any, target: Any) -> None:
    for i in range(len(source)):
        target[i] = widen(source[i])


@compiled()
def _transpose(keys: Any, tile: Any) -> None:
    """tile [D, TILE] = keysᵀ."""
    head_dim = keys.shape[1]
    whole = head_dim - head_dim % SIDE
    for low in range(0, TILE, SIDE):
        keys_at, tile_at = keys.ctypes.data + low * head_dim * 4, tile.ctypes.data + low * 4
        for d in range(0, whole, SIDE):
            transpose_words(keys_at + d * 4, head_dim * 4, tile_at + d * TILE * 4, TILE * 4)
    for d in range(whole, head_dim):
        for j in range(TILE):
            tile[d, j] = keys[j, d]


@compiled()
def _weighted_values(
    weights: Any, value: Any, block_table: Any, head: int, first: int, end: int, sums: Any
) -> None:
    """sums [G, D] += weights · values, a chain for each SEGMENT of absolute positions."""
    group, head_dim = sums.shape
    tile = np.empty((TILE, head_dim), _f32)
    chain = np.zeros((group, head_dim), _f32)
    for index in range(weights.shape[1]):
        token = first + index * TILE
        num_tokens = min(TILE, end - token)
        _gather(value, block_table, head, token, num_tokens, tile)
        factors = weights.ctypes.data + index * TILE * 4, weights.shape[1] * TILE * 4
        _add_values(factors, tile, num_tokens, chain)
        if (token + TILE) % SEGMENT == 0 or token + TILE >= end:
            for g in range(group):
                for d in range(head_dim):
                    sums[g, d] += chain[g, d]
                    chain[g, d] = _f32(0.0)


@compiled()
def _add_values(factors: Any, tile: Any, num_tokens: int, chain: Any) -> None:
    """chain [G, D] += factors [G, num_tokens] · tile, in as few chains as D allows."""
    group, head_dim = chain.shape
    row_bytes = head_dim * 4
    d = 0
    while d < head_dim:
        sums, rows = (chain.ctypes.data + d * 4, row_bytes), (tile.ctypes.data + d * 4, row_bytes)
        if d + 64 <= head_dim:
            _add_64(sums, factors, rows, num_tokens, group)
            d += 64
        elif d + 32 <= head_dim:
            _add_32(sums, factors, rows, num_tokens, group)
            d += 32
        elif d + 16 <= head_dim:
            _add_16(sums, factors, rows, num_tokens, group)
            d += 16
        else:
            _add_1(sums, factors, rows, num_tokens, group)
            d += 1


def _adds(num_lanes: int) -> Any:
    """`add_chains` for each of a group; arrays are (address, distance of rows)."""

    def add(sums: Any, factors: Any, rows: Any, num_rows: int, group: int) -> None:
        at, sums_bytes = sums
        factor, factors_bytes = factors
        row, row_bytes = rows
        g = 0
        while g < group:
            count = 4 if g + 4 <= group else 2 if g + 2 <= group else 1
            if count == 4:
                add_chains(
                    at, sums_bytes, factor, factors_bytes, row, row_bytes, num_rows, num_lanes, 4
                )
            elif count == 2:
                add_chains(
                    at, sums_bytes, factor, factors_bytes, row, row_bytes, num_rows, num_lanes, 2
                )
            else:
                add_chains(
                    at, sums_bytes, factor, factors_bytes, row, row_bytes, num_rows, num_lanes, 1
                )
            g += count
            at += count * sums_bytes
            factor += count * factors_bytes

    # Machine code goes by this name: of two alike, kept by different processes, one would be taken
    # for the other.
    add.__qualname__ = f"_add_{num_lanes}"
    return compiled()(add)


_add_64, _add_32, _add_16, _add_1 = _adds(64), _adds(32), _adds(16), _adds(1)
