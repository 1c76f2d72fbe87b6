"""Attention over a paged BF16 cache on AMX tiles: softmax(q·Kᵀ·scale)·V, causal.

One task computes one run of new tokens of one KV head, for decode and prefill alike. A context is
processed in segments of absolute positions, with the running maximum of each row (Milakov and
Gimelshein, Online normalizer calculation for softmax, 2018); weights are rounded to BF16 before
they are multiplied by the values. No row's bits depend on another's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import prange
from torch import Tensor

from kernels.cpu.attention.query_runs import runs_of
from kernels.cpu.attention.sinks import sink_exponents, sink_factor
from kernels.cpu.compile import compiled
from kernels.cpu.gemm.amx_gemm import STEP_BYTES, configure_for, multiply_block
from kernels.cpu.gemm.gemm_common import BLOCK
from kernels.cpu.simd.amx_tiles import (
    TILE_BYTES,
    TILE_ROWS,
    aligned,
    pair_rows,
    tile_release,
)
from kernels.cpu.simd.cpu_features import has_amx
from kernels.cpu.simd.f32x32 import (
    NUM_FLOATS,
    larger,
    largest,
    load_floats,
    load_halves,
    masked,
    same,
    store_floats,
    store_halves,
    total,
    weights_of,
)
from kernels.cpu.simd.intrinsics import (
    LOG2_E,
    array,
    exp2,
    expect_load,
    tanh,
    transpose_words,
)
from kernels.cpu.simd.tasks import num_tasks

SEGMENT = 128  # tokens
MAX_RUN_ROWS = 1024
MIN_RUNS = 4  # minimum per thread; fewer runs cannot be shared evenly
LOWEST = np.float32(-1e30)  # masks scores; unlike -inf, it can be subtracted from itself

_f32 = np.float32


def can_attend_on_amx(kv_cache: Tensor) -> bool:
    """Whether AMX can read kv_cache [2, num_blocks, num_kv_heads, block_size, D] in full tiles."""
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
    lower: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [T, num_heads, D], flat over S sequences -> [T, num_heads, D].

    kv_cache [2, num_blocks, num_kv_heads, block_size, D]; block_tables [S, B]; query_lens and
    context_lens [S], where a context includes the new tokens. `lower`, `softcap` and `sinks` as in
    `decode_attention`.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = kv_cache.shape[2]
    grouped = query.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = torch.empty_like(grouped, memory_format=torch.contiguous_format)
    max_run_tokens = max(MAX_RUN_ROWS // grouped.shape[2], 1)
    key, value = kv_cache[0], kv_cache[-1]  # one plane: values are parts of their keys
    runs = runs_of(query_lens.numpy(), context_lens.numpy(), max_run_tokens)
    # Heads of a run are adjacent in a block: one core reads all of them if there are enough runs to
    # share among the cores.
    num_together = num_kv_heads if len(runs) >= MIN_RUNS * numba.get_num_threads() else 1
    _attend(
        array(grouped),
        AmxCache(array(key), array(value)),
        block_tables.long().contiguous().numpy(),  # of a device: int32, a variant more
        runs,
        AmxMask(
            np.zeros(num_tokens, np.int32) if lower is None else lower.numpy(),
            _f32(0.0 if softcap is None else softcap),
            _f32(scale),
            _f32(scale * LOG2_E if softcap is None else LOG2_E),
            sink_exponents(sinks),
        ),
        num_together,
        num_tasks(len(runs) * num_kv_heads // num_together),
        array(out),
    )
    return out.view(num_tokens, num_heads, head_dim)


class AmxCache(NamedTuple):
    key: Any  # [num_blocks, H, block_size, D]
    value: Any


class AmxMask(NamedTuple):
    """Scales, caps and masks scores. A `softcap` of 0 is disabled."""

    lower: Any  # [T] int32: the first visible position of each new token
    softcap: Any
    scale: Any  # applied before the soft cap
    factor: Any  # applied after the soft cap, converts to an exponent of 2
    sinks: Any  # [num_heads] exponents of 2, or [0] for none


class AmxScratch(NamedTuple):
    """The memory of one thread, for a run of R rows."""

    rows: Any  # [R, D], the queries
    keys: Any  # [SEGMENT / 32, D / 32, 16, 32, 2], a segment as the columns of q·Kᵀ
    values: Any  # [D / 32, SEGMENT / 32, 16, 32, 2], a segment as the columns of weights·V
    tail: Any  # [2, 16, D], keys and values of an incomplete tile
    scores: Any  # [32, SEGMENT] of a block of rows; BF16 weights overwrite each row's first half
    tops: Any  # [R]: the largest score so far
    sums: Any  # [R]: the sum of the weights
    attended: Any  # [R, D]: the sum of the weighted values


@compiled()
def _scratch(num_rows: int, head_dim: int) -> Any:
    num_blocks, depth = SEGMENT // BLOCK, head_dim // BLOCK
    return AmxScratch(
        aligned(num_rows * head_dim * 2).view(np.uint16).reshape((num_rows, head_dim)),
        aligned(SEGMENT * head_dim * 2)
        .view(np.uint16)
        .reshape((num_blocks, depth, TILE_ROWS, BLOCK, 2)),
        aligned(SEGMENT * head_dim * 2)
        .view(np.uint16)
        .reshape((depth, num_blocks, TILE_ROWS, BLOCK, 2)),
        np.empty((2, TILE_ROWS, head_dim), np.uint16),
        aligned(BLOCK * SEGMENT * 4).view(np.float32).reshape((BLOCK, SEGMENT)),
        np.empty(num_rows, np.float32),
        np.empty(num_rows, np.float32),
        aligned(num_rows * head_dim * 4).view(np.float32).reshape((num_rows, head_dim)),
    )


@compiled(parallel=True)
def _attend(
    query: Any,  # [T, H, G, D]
    cache: Any,
    block_tables: Any,
    runs: Any,
    mask: Any,
    num_together: int,  # KV heads per item
    num_tasks: int,
    out: Any,  # [T, H, G, D]
) -> None:
    _, num_kv_heads, group, head_dim = query.shape
    max_rows = (runs[:, 2] - runs[:, 1]).max() * group
    num_items = len(runs) * num_kv_heads // num_together
    for task in prange(num_tasks):
        scratch = _scratch(max_rows, head_dim)
        # Tasks take items in a round-robin order: adjacent items have equally long contexts.
        for item in range(task, num_items, num_tasks):
            first = item * num_together
            seq, low, high, position = runs[first // num_kv_heads]
            for head in range(first % num_kv_heads, first % num_kv_heads + num_together):
                _begin(query, head, low, high - low, scratch)
                _attend_run(
                    cache,
                    block_tables[seq],
                    head,
                    low,
                    position,
                    high - low,
                    group,
                    mask,
                    scratch,
                )
                _divide(scratch, head, low, high - low, mask.sinks, out)
        tile_release()


@compiled(is_inlined=True)
def _attend_run(
    cache: Any,
    block_table: Any,
    head: int,
    row: int,  # the first token's, in the batch
    position: int,  # the first token's
    num_tokens: int,
    group: int,
    mask: Any,
    scratch: Any,
) -> None:
    num_rows = num_tokens * group
    end = position + num_tokens
    lowest = np.int64(mask.lower[row])  # covers all tokens: bounds never decrease
    num_configured = 0  # rows of the tiles; configuring costs as much as a few products
    for segment in range(lowest // SEGMENT * SEGMENT, end, SEGMENT):
        _pack(cache, block_table, head, segment, (lowest, end), scratch)
        reach = position - segment  # the column of the first token
        for low in range(0, num_rows, BLOCK):
            high = min(low + BLOCK, num_rows)
            last_column = reach + (high - 1) // group
            if last_column >= 0:
                num_columns = min(_whole_blocks(last_column + 1), SEGMENT)
                if high - low != num_configured:
                    num_configured = high - low
                    configure_for(num_configured)
                _score(scratch, low, high, num_columns)
                at = segment, reach, row, group
                _raise_tops(scratch, low, high, at, mask)
                _weigh(scratch, low, high, at, num_columns, mask)
                _add_values(scratch, low, high, num_columns)


@compiled(is_inlined=True)
def _begin(query: Any, head: int, low: int, num_tokens: int, scratch: Any) -> None:
    """Loads the queries of one KV head, for tokens from `low` on, into the scratch."""
    _, num_heads, group, head_dim = query.shape
    rows, _, _, _, _, tops, sums, attended = scratch
    num_elements = group * head_dim
    for token in range(num_tokens):
        query_at = query.ctypes.data + ((low + token) * num_heads + head) * num_elements * 2
        rows_at = rows.ctypes.data + token * num_elements * 2
        attended_at = attended.ctypes.data + token * num_elements * 4
        for element in range(0, num_elements, NUM_FLOATS):
            store_halves(load_halves(query_at + element * 2), rows_at + element * 2)
            store_floats(same(_f32(0.0)), attended_at + element * 4)
    for row in range(num_tokens * group):
        tops[row], sums[row] = LOWEST, 0.0


@compiled()
def _whole_blocks(num_columns: int) -> Any:
    return (num_columns + BLOCK - 1) // BLOCK * BLOCK


@compiled(is_inlined=True)
def _score(scratch: Any, low: int, high: int, num_columns: int) -> None:
    """scores [R, columns] = rows [low, high) · keysᵀ."""
    row_bytes, depth = scratch.rows.shape[1] * 2, scratch.keys.shape[1]
    rows_at = scratch.rows.ctypes.data + low * row_bytes
    for block in range(num_columns // BLOCK):
        keys_at = scratch.keys.ctypes.data + block * depth * STEP_BYTES
        at = scratch.scores.ctypes.data + block * BLOCK * 4
        multiply_block(rows_at, row_bytes, keys_at, depth, high - low, at, SEGMENT * 4, True)


@compiled(is_inlined=True)
def _raise_tops(scratch: Any, low: int, high: int, at: Any, mask: Any) -> None:
    """Finds the largest scores of rows [low, high). A row's sums so far are rescaled to its new
    maximum.

    `at`: first position of the segment, column of token 0, its row in the batch, rows per token.
    """
    _, _, _, _, scores, tops, sums, attended = scratch
    if mask.softcap > 0.0:
        _cap(scores, high - low, mask)
    for row in range(low, high):
        row_at = scores.ctypes.data + (row - low) * SEGMENT * 4
        start, end = _visible(at, row, mask)
        seen = same(LOWEST)
        for first in range(start // BLOCK * BLOCK, end, BLOCK):
            seen = larger(_seen(row_at, first, start, end), seen)
        top = max(tops[row], largest(seen) * mask.factor)
        rescale = exp2(tops[row] - top)
        tops[row] = top
        if rescale != 1.0:
            sums[row] *= rescale
            attended_at = attended.ctypes.data + row * attended.shape[1] * 4
            for d in range(0, attended.shape[1], NUM_FLOATS):
                sum_at = attended_at + d * 4
                store_floats(load_floats(sum_at) * rescale, sum_at)


@compiled(is_inlined=True)
def _weigh(scratch: Any, low: int, high: int, at: Any, num_columns: int, mask: Any) -> None:
    """Turns the scores of rows [low, high) into weights. A second loop, so that no row waits for
    the maximum of its scores."""
    _, _, _, _, scores, tops, sums, _ = scratch
    for row in range(low, high):
        row_at = scores.ctypes.data + (row - low) * SEGMENT * 4
        start, end = _visible(at, row, mask)
        summed = same(_f32(0.0))
        for first in range(0, num_columns, BLOCK):
            if first + BLOCK <= start or first >= end:
                weights = same(_f32(0.0))
            else:
                seen = _seen(row_at, first, start, end)
                weights = weights_of(seen, mask.factor, tops[row])
                summed = summed + weights
            store_halves(weights, row_at + first * 2)
        sums[row] += total(summed)


@compiled(is_inlined=True)
def _seen(row_at: int, first: int, start: int, end: int) -> Any:
    """Loads the scores of columns from `first` on, of which [start, end) are visible."""
    seen = load_floats(row_at + first * 4)
    if first < start or first + BLOCK > end:
        seen = masked(seen, start - first, end - first)
    return seen


@compiled()
def _visible(at: Any, row: int, mask: Any) -> Any:
    """[start, end) of the columns that are visible to a row of the run; `at` as above."""
    segment, reach, first_row, group = at
    token = row // group
    end = min(max(reach + token + 1, 0), SEGMENT)
    start = max(0, mask.lower[first_row + token] - segment)
    return min(start, end), end


@compiled()
def _cap(scores: Any, num_rows: int, mask: Any) -> None:
    for row in range(num_rows):
        for column in range(SEGMENT):
            x = scores[row, column] * mask.scale / mask.softcap
            scores[row, column] = mask.softcap * tanh(x)


@compiled(is_inlined=True)
def _add_values(scratch: Any, low: int, high: int, num_columns: int) -> None:
    """attended [R, D] += weights [R, columns] · values."""
    weights_at, sum_bytes = scratch.scores.ctypes.data, scratch.attended.shape[1] * 4
    num_steps, most_steps = num_columns // BLOCK, scratch.values.shape[1]
    for block in range(scratch.values.shape[0]):
        values_at = scratch.values.ctypes.data + block * most_steps * STEP_BYTES
        at = scratch.attended.ctypes.data + low * sum_bytes + block * BLOCK * 4
        multiply_block(
            weights_at, SEGMENT * 4, values_at, num_steps, high - low, at, sum_bytes, False
        )


@compiled(is_inlined=True)
def _divide(scratch: Any, head: int, low: int, num_tokens: int, sinks: Any, out: Any) -> None:
    _, num_heads, group, head_dim = out.shape
    _, _, _, _, _, tops, sums, attended = scratch
    for row in range(num_tokens * group):
        factor = _f32(1.0) / sums[row]
        if len(sinks):
            factor = sink_factor(tops[row], sums[row], sinks[head * group + row % group])
        attended_at = attended.ctypes.data + row * head_dim * 4
        token, member = low + row // group, row % group
        out_at = out.ctypes.data + ((token * num_heads + head) * group + member) * head_dim * 2
        for d in range(0, head_dim, NUM_FLOATS):
            store_halves(load_floats(attended_at + d * 4) * factor, out_at + d * 2)


@compiled(is_inlined=True)
def _pack(
    cache: Any, block_table: Any, head: int, segment: int, readable: Any, scratch: Any
) -> None:
    """Packs the tokens of a segment of one KV head as columns of the two products.

    Zeros stand for tiles before `readable`, whose blocks may be of another sequence by now, and
    follow it up to a multiple of BLOCK: a block's last owner can have left NaN after the context's
    end, and 0 · NaN is NaN.
    """
    lowest, end = readable
    num_tokens = min(end - segment, SEGMENT)
    _, keys, values, tail, _, _, _, _ = scratch
    row_bytes, depth, num_places = cache.key.shape[3] * 2, keys.shape[1], values.shape[1]
    for first in range(0, _whole_blocks(num_tokens), TILE_ROWS):
        num_left = num_tokens - first
        token = segment + first
        if num_left >= TILE_ROWS and token + TILE_ROWS > lowest:
            key_at, value_at = _tile_at(cache, block_table, head, token)
            if num_left > TILE_ROWS:
                _expect(_tile_at(cache, block_table, head, token + TILE_ROWS), row_bytes)
        else:
            num_read = num_left if token + TILE_ROWS > lowest else 0
            _fill_tail(cache, block_table, head, token, num_read, tail)
            key_at, value_at = tail.ctypes.data, tail.ctypes.data + TILE_ROWS * row_bytes
        block, half = first // BLOCK, first % BLOCK
        for step in range(depth):
            at = keys.ctypes.data + (block * depth + step) * STEP_BYTES + half * 4
            transpose_words(key_at + step * BLOCK * 2, row_bytes, at, BLOCK * 4)
            at = values.ctypes.data + (step * num_places + block) * STEP_BYTES + half * BLOCK * 2
            row_at = value_at + step * BLOCK * 2
            for _ in range(TILE_ROWS // 2):
                pair_rows(row_at, row_at + row_bytes, at)
                row_at += 2 * row_bytes
                at += 2 * BLOCK * 2


@compiled(is_inlined=True)
def _tile_at(cache: Any, block_table: Any, head: int, token: int) -> Any:
    """The addresses of TILE_ROWS keys and values."""
    _, num_heads, block_size, head_dim = cache.key.shape
    place = (block_table[token // block_size] * num_heads + head) * block_size
    offset = (place + token % block_size) * head_dim * 2
    return cache.key.ctypes.data + offset, cache.value.ctypes.data + offset


@compiled(is_inlined=True)
def _expect(tile: Any, row_bytes: int) -> None:
    """Prefetches keys and values while others are packed: no prefetcher follows the block table."""
    key_at, value_at = tile
    for offset in range(0, TILE_ROWS * row_bytes, TILE_BYTES):
        expect_load(key_at + offset)
        expect_load(value_at + offset)


@compiled(is_inlined=True)
def _fill_tail(
    cache: Any, block_table: Any, head: int, token: int, num_left: int, tail: Any
) -> None:
    key, value = cache
    for row in range(TILE_ROWS):
        if row < num_left:
            block_id = block_table[(token + row) // key.shape[2]]
            offset = (token + row) % key.shape[2]
            for d in range(tail.shape[2]):
                tail[0, row, d] = key[block_id, head, offset, d]
                tail[1, row, d] = value[block_id, head, offset, d]
        else:
            for d in range(tail.shape[2]):
                tail[0, row, d] = tail[1, row, d] = np.uint16(0)
