"""Attention over a paged BF16 cache on AMX's tiles: softmax(q·Kᵀ·scale)·V, causal.

One task a run of new tokens and KV head, decoding and prefill alike. A context is taken in segments
of absolute positions, with the running maximum of each row (Milakov and Gimelshein, Online
normalizer calculation for softmax, 2018); weights are rounded to BF16 before they meet the values.
No row's bits depend on another's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from kernels.cpu.amx import (
    TILE_ROWS,
    has_amx,
    pair_rows,
    round_to_bf16,
    tile_configure,
    tile_release,
    transpose_pairs,
)
from kernels.cpu.amx_linear import BLOCK, CONFIGS, multiply_block
from kernels.cpu.compiled import compiled
from kernels.cpu.lanes import LANES, LOG2_E, array, exp2, join_lanes, narrow
from kernels.cpu.softmax import largest_score, weigh_scores

SEGMENT = 512  # tokens; keys and values of one KV head stay in a core's cache
MAX_RUN_ROWS = 512

_f32 = np.float32


def can_attend_on_amx(kv_cache: Tensor) -> bool:
    """kv_cache [2, num_blocks, num_kv_heads, block_size, D]: whole tiles of BF16, on such a CPU."""
    block_size, head_dim = kv_cache.shape[3:]
    is_whole = block_size % TILE_ROWS == 0 and head_dim % BLOCK == 0
    return is_whole and kv_cache.dtype == torch.bfloat16 and has_amx()


def amx_attention(
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
    """query [T, num_heads, D], flat over S sequences -> the same shape.

    kv_cache [2, num_blocks, num_kv_heads, block_size, D]; block_tables [S, B]; query_lens and
    context_lens [S], the new tokens included in a context. `window` and `softcap` as in
    `decode_attention`.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = kv_cache.shape[2]
    grouped = query.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = torch.empty_like(grouped, memory_format=torch.contiguous_format)
    key, value = kv_cache.unbind(0)
    _attend(
        array(grouped),
        array(key),
        array(value),
        block_tables.numpy(),
        _runs(query_lens, context_lens, max(MAX_RUN_ROWS // grouped.shape[2], 1)),
        _f32(scale if softcap is not None else scale * LOG2_E),
        0 if window is None else window,
        _f32(0.0 if softcap is None else softcap),
        CONFIGS,
        array(out),
    )
    return out.view(num_tokens, num_heads, head_dim)


def _runs(query_lens: Tensor, context_lens: Tensor, max_tokens: int) -> Any:
    """[n, 4]: sequence, first row and row after the last one in the flat batch, first position."""
    lens, ends = query_lens.numpy(), np.cumsum(query_lens.numpy())
    if (lens == 1).all():
        order = np.arange(len(lens))
        return np.stack((order, order, order + 1, context_lens.numpy() - 1), axis=1)
    runs = []
    for seq, (num_rows, end) in enumerate(zip(lens.tolist(), ends.tolist(), strict=True)):
        shift = int(context_lens[seq]) - end
        for low in range(end - num_rows, end, max_tokens):
            runs.append((seq, low, min(low + max_tokens, end), low + shift))
    return np.array(runs)


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
    configs: Any,
    out: Any,  # [T, H, G, D]
) -> None:
    num_kv_heads = query.shape[1]
    for item in prange(len(runs) * num_kv_heads):
        run, head = item // num_kv_heads, item % num_kv_heads
        seq, low, high, position = runs[run]
        _attend_run(
            query[low:high, head],
            key,
            value,
            block_tables[seq],
            head,
            position,
            scale,
            window,
            softcap,
            configs,
            out[low:high, head],
        )
        tile_release()


@compiled()
def _attend_run(
    query: Any,  # [R, G, D]
    key: Any,
    value: Any,
    block_table: Any,
    head: int,
    position: int,  # of the first token
    scale: Any,
    window: int,
    softcap: Any,
    configs: Any,
    out: Any,
) -> None:
    num_tokens, group, head_dim = query.shape
    num_rows = num_tokens * group
    rows = np.empty((num_rows, head_dim), np.uint16)
    for row in range(num_rows):
        rows[row] = query[row // group, row % group]
    tops = np.full(num_rows, -np.inf, _f32)
    sums = np.zeros((num_rows, LANES), _f32)
    attended = np.zeros((num_rows, head_dim), _f32)
    end = position + num_tokens
    start = (max(0, position + 1 - window) if window else 0) // SEGMENT * SEGMENT
    max_rows, max_columns = min(num_rows, BLOCK), min(_whole_lanes(end - start), SEGMENT)
    keys = np.empty((max_columns // BLOCK, head_dim // BLOCK, TILE_ROWS, BLOCK, 2), np.uint16)
    values = np.empty((head_dim // BLOCK, max_columns // BLOCK, TILE_ROWS, BLOCK, 2), np.uint16)
    scores = np.empty(max_rows * max_columns, _f32)
    weights = np.empty(max_rows * max_columns, np.uint16)
    products = np.empty((max_rows, head_dim), _f32)
    for segment in range(start, end, SEGMENT):
        _pack(key, value, block_table, head, segment, min(end - segment, SEGMENT), keys, values)
        reach = position - segment  # of the first token, as a column
        for low in range(0, num_rows, BLOCK):
            high = min(low + BLOCK, num_rows)
            last_column = reach + (high - 1) // group
            if last_column >= 0:
                shape = (high - low, min(_whole_lanes(last_column + 1), SEGMENT) // LANES, LANES)
                size = shape[0] * shape[1] * LANES
                block_scores = scores[:size].reshape(shape)
                block_weights = weights[:size].reshape((shape[0], shape[1] * LANES))
                tile_configure(configs[high - low - 1].ctypes.data)
                _score(rows[low:high], keys, block_scores)
                for row in range(low, high):
                    _weigh_row(
                        block_scores,
                        row - low,
                        reach + row // group,
                        scale,
                        window,
                        softcap,
                        row,
                        tops,
                        sums,
                        attended,
                    )
                _round(scores, weights, size)
                _add_values(block_weights, values, products, attended[low:high])
    for row in range(num_rows):
        total = join_lanes(sums[row])
        for d in range(head_dim):
            out[row // group, row % group, d] = narrow(attended[row, d] / total, out.dtype)


@compiled()
def _whole_lanes(num_columns: int) -> Any:
    return (num_columns + LANES - 1) // LANES * LANES


@compiled()
def _score(rows: Any, keys: Any, scores: Any) -> None:
    """scores [R, pieces, LANES] = rows [R, D] · keysᵀ."""
    num_rows, head_dim = rows.shape
    num_columns = scores.shape[1] * LANES
    for block in range(num_columns // BLOCK):
        at = scores.ctypes.data + block * BLOCK * 4
        multiply_block(rows.ctypes.data, head_dim * 2, keys[block], num_rows, at, num_columns * 4)


@compiled()
def _weigh_row(
    scores: Any,
    row: int,
    column: int,
    scale: Any,
    window: int,
    softcap: Any,
    index: int,
    tops: Any,
    sums: Any,
    attended: Any,
) -> None:
    """Turns scores[row], of a token that stands at `column`, into weights.

    Row `index` of the run gets its new largest score and the sums of its weights; what it had
    summed so far is rescaled.
    """
    end = min(max(column + 1, 0), scores.shape[1] * LANES)
    start = min(max(0, column + 1 - window), end) if window else 0
    for piece in range(scores.shape[1]):
        for lane in range(LANES):
            scores[row, piece, lane] *= scale
    highest = largest_score(scores, row, start, end, softcap)
    if highest > tops[index]:
        rescale = exp2(tops[index] - highest)
        tops[index] = highest
        for lane in range(LANES):
            sums[index, lane] *= rescale
        for d in range(attended.shape[1]):
            attended[index, d] *= rescale
    weigh_scores(scores, row, start, end, tops[index], sums, index)


@compiled()
def _round(scores: Any, weights: Any, size: int) -> None:
    for j in range(0, size, BLOCK):
        round_to_bf16(scores.ctypes.data + j * 4, weights.ctypes.data + j * 2)


@compiled()
def _add_values(weights: Any, values: Any, products: Any, attended: Any) -> None:
    """attended [R, D] += weights [R, columns] · values."""
    num_rows, head_dim = attended.shape
    num_columns = weights.shape[1]
    for block in range(head_dim // BLOCK):
        columns = values[block, : num_columns // BLOCK]
        at = products.ctypes.data + block * BLOCK * 4
        multiply_block(weights.ctypes.data, num_columns * 2, columns, num_rows, at, head_dim * 4)
    for row in range(num_rows):
        for d in range(head_dim):
            attended[row, d] += products[row, d]


@compiled()
def _pack(
    key: Any,
    value: Any,
    block_table: Any,
    head: int,
    segment: int,
    num_tokens: int,
    keys: Any,
    values: Any,
) -> None:
    """Tokens [segment, segment + num_tokens) of one KV head, as the columns of the two products.

    Zeros follow up to a multiple of LANES. A block's last owner can have left NaN behind the
    context's end, and 0 · NaN is NaN.
    """
    block_size, head_dim = key.shape[2:]
    row_bytes = head_dim * 2
    tail = np.zeros((2, TILE_ROWS, head_dim), np.uint16)
    for first in range(0, _whole_lanes(num_tokens), TILE_ROWS):
        num_left = num_tokens - first
        key_at, value_at = tail[0].ctypes.data, tail[1].ctypes.data
        if num_left > 0:
            token = segment + first
            block_id, offset = block_table[token // block_size], token % block_size
            if num_left >= TILE_ROWS:
                key_at = key[block_id, head, offset].ctypes.data
                value_at = value[block_id, head, offset].ctypes.data
            else:
                tail[0, :num_left] = key[block_id, head, offset : offset + num_left]
                tail[1, :num_left] = value[block_id, head, offset : offset + num_left]
        elif num_left > -TILE_ROWS:
            tail[:] = 0
        place, half = first // BLOCK, first % BLOCK
        for block in range(head_dim // BLOCK):
            at = keys[place, block].ctypes.data + half * 4
            transpose_pairs(key_at + block * BLOCK * 2, row_bytes, at, BLOCK * 4)
            for pair in range(TILE_ROWS // 2):
                row_at = value_at + 2 * pair * row_bytes + block * BLOCK * 2
                target = values[block, place, half // 2 + pair].ctypes.data
                pair_rows(row_at, row_at + row_bytes, target)
