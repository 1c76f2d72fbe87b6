"""Attention over a paged cache in FP32 lanes: softmax(q·Kᵀ·scale)·V, causal; any dtype and size.

One task a run of new tokens and KV head, decoding and prefill alike: the rows of a run read each
key and value once. A score is one chain of fused multiply-adds over the head's dimensions, an
output element one over each SEGMENT of keys; what a row does not see adds zeros. So no row's bits
depend on another's, nor on where runs are cut.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import prange
from torch import Tensor

from kernels.cpu.compiled import compiled
from kernels.cpu.lanes import (
    LANES,
    LOG2_E,
    SIDE,
    add_chains,
    array,
    expect_load,
    narrow,
    sum_of_lanes,
    transpose_words,
    widen,
)
from kernels.cpu.runs import runs_of
from kernels.cpu.softmax import largest_score, weigh_scores

TILE = LANES  # keys whose scores are computed together
LINE_BYTES = 64
SEGMENT = 512  # keys whose values are summed in one chain; a multiple of TILE
MAX_RUN_ROWS = 64  # beyond it a key's way into the lanes is a small part of what is done with it

FEW_ROWS = 16  # memory is what they wait for; with more, it comes in time anyway

_f32 = np.float32


def vector_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_lens: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As kernels.cpu.amx_attention, of any dtype, head_dim and block_size."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = kv_cache.shape[2]
    grouped = query.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = torch.empty_like(grouped, memory_format=torch.contiguous_format)
    max_run_tokens = max(MAX_RUN_ROWS // grouped.shape[2], 1)
    key, value = kv_cache.unbind(0)
    _attend(
        array(grouped),
        array(key),
        array(value),
        block_tables.numpy(),
        runs_of(query_lens.numpy(), context_lens.numpy(), max_run_tokens),
        _f32(scale if softcap is not None else scale * LOG2_E),
        0 if window is None else window,
        _f32(0.0 if softcap is None else softcap),
        numba.get_num_threads(),
        array(out),
    )
    return out.view(num_tokens, num_heads, head_dim)


@compiled(parallel=True)
def _attend(
    query: Any,  # [T, H, G, D]
    key: Any,  # [num_blocks, H, block_size, D]
    value: Any,
    block_tables: Any,
    runs: Any,
    scale: Any,
    window: Any,  # 0: none
    softcap: Any,  # 0: none
    num_tasks: int,
    out: Any,  # [T, H, G, D]
) -> None:
    num_kv_heads = query.shape[1]
    num_items = len(runs) * num_kv_heads
    for task in prange(num_tasks):
        # Each task takes every so many items: neighbours attend to equally long contexts.
        for item in range(task, num_items, num_tasks):
            run, head = item // num_kv_heads, item % num_kv_heads
            seq, low, high, position = runs[run]
            rows, done = query[low:high, head], out[low:high, head]
            cache = key, value, block_tables[seq]
            _attend_run(rows, cache, head, position, scale, window, softcap, done)


@compiled()
def _attend_run(
    query: Any,  # [R, G, D]
    cache: Any,
    head: int,
    position: int,  # of the first token
    scale: Any,
    window: Any,
    softcap: Any,
    out: Any,  # [R, G, D]
) -> None:
    num_tokens, group, head_dim = query.shape
    num_rows, end = num_tokens * group, position + num_tokens
    first = (max(0, position + 1 - window) if window else 0) // TILE * TILE
    num_tiles = (end - first + TILE - 1) // TILE
    rows = np.empty((num_rows, head_dim), _f32)
    for row in range(num_rows):
        for d in range(head_dim):
            rows[row, d] = widen(query[row // group, row % group, d]) * scale
    weights = np.zeros((num_rows, num_tiles, TILE), _f32)
    _scores(rows, cache, head, first, end, weights)
    lanes = np.zeros((num_rows, LANES), _f32)
    for row in range(num_rows):
        own_end = position + row // group + 1 - first
        own_start = max(0, own_end - window) if window else 0
        top = largest_score(weights, row, own_start, own_end, softcap)
        weigh_scores(weights, row, own_start, own_end, top, lanes, row)
    sums = np.zeros((num_rows, head_dim), _f32)
    _weighted_values(weights, cache, head, first, end, sums)
    for row in range(num_rows):
        total = sum_of_lanes(lanes[row].ctypes.data)
        for d in range(head_dim):
            out[row // group, row % group, d] = narrow(sums[row, d] / total, out.dtype)


@compiled()
def _scores(rows: Any, cache: Any, head: int, first: int, end: int, scores: Any) -> None:
    """scores [R, tiles, TILE] of the keys from `first` on; those from `end` on hold no number."""
    key, value, block_table = cache
    num_rows, head_dim = rows.shape
    keys = np.zeros((TILE, head_dim), _f32)
    tile = np.empty((head_dim, TILE), _f32)  # transposed: a lane a key
    for index in range(scores.shape[1]):
        token = first + index * TILE
        if num_rows <= FEW_ROWS:
            _expect(key, block_table, head, token + TILE, min(token + 2 * TILE, end))
            _expect(value, block_table, head, token, min(token + TILE, end))
        _gather(key, block_table, head, token, min(TILE, end - token), keys)
        _transpose(keys, tile)
        sums = scores.ctypes.data + index * TILE * 4, scores.shape[1] * TILE * 4
        factors = rows.ctypes.data, head_dim * 4
        _add_64(sums, factors, (tile.ctypes.data, TILE * 4), head_dim, num_rows)


@compiled()
def _expect(plane: Any, block_table: Any, head: int, token: int, end: int) -> None:
    """Fetches a head's keys or values [token, end): no prefetcher knows the block table."""
    _, num_heads, block_size, head_dim = plane.shape
    row_bytes = head_dim * plane.itemsize
    while token < end:
        offset = token % block_size
        count = min(block_size - offset, end - token)
        place = (block_table[token // block_size] * num_heads + head) * block_size + offset
        for line in range(0, count * row_bytes, LINE_BYTES):
            expect_load(plane.ctypes.data + place * row_bytes + line)
        token += count


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
def _weighted_values(weights: Any, cache: Any, head: int, first: int, end: int, sums: Any) -> None:
    """sums [R, D] += weights · values, a chain for each SEGMENT of absolute positions."""
    _, value, block_table = cache
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
    """chain [R, D] += factors [R, num_tokens] · tile, in as few chains as D allows."""
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
