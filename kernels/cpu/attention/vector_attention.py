"""Attention over a paged cache in FP32 lanes: softmax(q·Kᵀ·scale)·V, causal; any dtype and size.

One task computes one run of new tokens of one KV head, for decode and prefill alike: the rows of
a run share each read of a key and value. A score is one chain of fused multiply-adds over the
head's dimensions, an output element is one chain over each SEGMENT of keys; masked keys add zeros.
So no row's bits depend on another's, nor on where runs are cut.
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
from kernels.cpu.simd.amx_tiles import aligned
from kernels.cpu.simd.dtype_convert import load_numbers, store_numbers
from kernels.cpu.simd.f32x32 import (
    NUM_FLOATS,
    exp2_floats,
    larger,
    largest,
    load_floats,
    masked,
    same,
    store_floats,
    tanh_floats,
    total,
)
from kernels.cpu.simd.intrinsics import (
    LOG2_E,
    SIDE,
    add_chains,
    array,
    expect_load,
    transpose_words,
)

TILE = 64  # keys whose scores are computed together; a multiple of NUM_FLOATS
LINE_BYTES = 64
SEGMENT = 512  # keys whose values are summed in one chain; a multiple of TILE
MAX_RUN_ROWS = 64  # loading a key into lanes is a small part of the cost of more rows
MIN_RUNS = 4  # minimum per thread; fewer runs cannot be shared evenly
FEW_ROWS = 16  # such runs are memory-bound and prefetch; with more rows, memory keeps up anyway

_f32 = np.float32


def vector_attention(
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
    """Computes kernels.cpu.attention.amx_attention for any dtype, head_dim and block_size."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    grouped = query.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = torch.empty_like(grouped, memory_format=torch.contiguous_format)
    max_run_tokens = max(MAX_RUN_ROWS // grouped.shape[2], 1)
    key, value = kv_cache[0], kv_cache[-1]  # one plane: values are parts of their keys
    is_direct = kv_cache.dtype == torch.float32 and block_size % SIDE == 0 and head_dim % SIDE == 0
    _attend(
        array(grouped.contiguous()),
        Cache(array(key), array(value)),
        block_tables.long().contiguous().numpy(),  # of a device: int32, a variant more
        runs_of(query_lens.numpy(), context_lens.numpy(), max_run_tokens),
        _mask(lower, softcap, sinks, num_tokens),
        True if is_direct else None,
        _f32(scale if softcap is not None else scale * LOG2_E),
        numba.get_num_threads(),
        array(out),
    )
    return out.view(num_tokens, num_heads, head_dim)


class Cache(NamedTuple):
    key: Any  # [num_blocks, H, block_size, D]
    value: Any


class Mask(NamedTuple):
    """Limits the keys of a token, and their scores. A `softcap` of 0 is disabled."""

    lower: Any  # [T] int32: the first visible position of each new token
    softcap: Any
    sinks: Any  # [num_heads] exponents of 2, or [0] for none


def _mask(
    lower: Tensor | None, softcap: float | None, sinks: Tensor | None, num_tokens: int
) -> Mask:
    bounds = np.zeros(num_tokens, np.int32) if lower is None else lower.numpy()
    return Mask(bounds, _f32(0.0 if softcap is None else softcap), sink_exponents(sinks))


class Scratch(NamedTuple):
    """The memory of one thread, for a run of R rows; D' is D rounded up to a multiple of SIDE.

    Arrays that are accessed in full Floats have room for one more at the end. Loops need their own
    names for the arrays: numba drops `scratch.tops[row] = x` as dead code in parallel functions.
    """

    rows: Any  # [R · D], the queries
    gathered: Any  # [TILE · D], keys or values
    keys: Any  # [D' · TILE], transposed: one lane per key
    scores: Any  # [R · the context rounded up to TILE], then the weights
    tops: Any  # [R], the largest scores
    totals: Any  # [R], the sums of the weights
    chain: Any  # [R · D'], weighted values of the current SEGMENT
    sums: Any  # [R · D'], weighted values of the SEGMENTs before it


@compiled()
def _scratch(num_rows: int, head_dim: int, num_scores: int) -> Any:
    width = _whole(head_dim, SIDE)
    return Scratch(
        _floats(num_rows * head_dim + NUM_FLOATS),
        _floats(TILE * head_dim + NUM_FLOATS),
        _floats(width * TILE),
        _floats(num_scores),
        _floats(num_rows),
        _floats(num_rows),
        _floats(num_rows * width + NUM_FLOATS),
        _floats(num_rows * width + NUM_FLOATS),
    )


@compiled()
def _floats(count: int) -> Any:
    return aligned(count * 4).view(_f32)


@compiled()
def _whole(count: int, size: int) -> int:
    return (count + size - 1) // size * size


@compiled(parallel=True)
def _attend(
    query: Any,  # [T, H, G, D]
    cache: Any,
    block_tables: Any,
    runs: Any,
    mask: Any,
    direct: Any,
    scale: Any,
    num_tasks: int,
    out: Any,  # [T, H, G, D]
) -> None:
    """Attends a batch of runs. With `direct` an FP32 cache of full squares is read in place; it is
    None elsewhere: numba compiles a separate variant for None, so that unused code is not compiled.
    """
    _, num_kv_heads, group, head_dim = query.shape
    # A literal would compile a second variant of `_scratch`.
    max_rows, num_scores = np.int64(0), np.int64(0)
    for _, low, high, position in runs:
        num_rows, end = (high - low) * group, position + high - low
        max_rows = max(max_rows, num_rows)
        num_scores = max(num_scores, num_rows * _whole(end - _start(_lowest(low, mask)), TILE))
    # Heads of a run are adjacent in a block: one thread reads all of them if there are enough runs
    # for each thread.
    num_together = num_kv_heads if len(runs) >= MIN_RUNS * num_tasks else 1
    num_items = len(runs) * num_kv_heads // num_together
    for task in prange(num_tasks):
        scratch = _scratch(max_rows, head_dim, num_scores)
        # Tasks take items in a round-robin order: adjacent items have equally long contexts.
        for item in range(task, num_items, num_tasks):
            first = item * num_together
            seq, low, high, position = runs[first // num_kv_heads]
            block_table, num_tokens = block_tables[seq], high - low
            for head in range(first % num_kv_heads, first % num_kv_heads + num_together):
                _begin(query, head, low, num_tokens, scale, scratch)
                at = head, position, num_tokens, group, low, _lowest(low, mask)
                _score(cache, block_table, at, direct, scratch)
                _weigh(at, mask, scratch)
                _add_values(cache, block_table, at, direct, scratch)
                _divide(scratch, head, low, num_tokens, mask.sinks, out)


@compiled()
def _lowest(row: int, mask: Any) -> Any:
    """The first position that a run from `row` of the batch on reads: bounds never decrease."""
    return np.int64(mask.lower[row])


@compiled()
def _start(lowest: int) -> int:
    """The start of the tile with the first visible position."""
    return lowest // TILE * TILE


@compiled(is_inlined=True)
def _begin(query: Any, head: int, low: int, num_tokens: int, scale: Any, scratch: Any) -> None:
    """Loads the queries of one KV head, for tokens from `low` on, into the scratch."""
    rows, _, _, _, _, _, chain, sums = scratch
    _, num_heads, group, head_dim = query.shape
    num_elements = group * head_dim
    for token in range(num_tokens):
        place = ((low + token) * num_heads + head) * num_elements
        query_at = query.ctypes.data + place * query.itemsize
        rows_at = rows.ctypes.data + token * num_elements * 4
        for i in range(0, num_elements, NUM_FLOATS):
            x = load_numbers(query_at + i * query.itemsize, query.dtype, num_elements - i)
            store_floats(x * scale, rows_at + i * 4)
    zeros = same(_f32(0.0))
    for i in range(0, num_tokens * group * _whole(head_dim, SIDE), NUM_FLOATS):
        store_floats(zeros, chain.ctypes.data + i * 4)
        store_floats(zeros, sums.ctypes.data + i * 4)


@compiled(is_inlined=True)
def _score(cache: Any, block_table: Any, at: Any, direct: Any, scratch: Any) -> None:
    """scores [R, keys of full tiles]; undefined before the first visible key and after the last.

    `at`: head, position of the first token, number of tokens, queries per token, row of the first
    token in the batch, first visible position. Earlier blocks are not read: they may be of another
    sequence by now.
    """
    head, position, num_tokens, group, _, lowest = at
    rows, gathered, keys, scores, _, _, _, _ = scratch
    head_dim, end = cache.key.shape[3], position + num_tokens
    start = _start(lowest)
    row_bytes, num_rows = _whole(end - start, TILE) * 4, num_tokens * group
    factors = rows.ctypes.data, head_dim * 4
    keys_at, key_bytes = keys.ctypes.data, TILE * 4
    packed = keys_at, key_bytes
    for token in range(start, end, TILE):
        count, skipped = min(TILE, end - token), max(0, lowest - token)
        if num_rows <= FEW_ROWS:
            _expect(cache.key, block_table, head, token + TILE, min(token + 2 * TILE, end))
            _expect(cache.value, block_table, head, token + skipped, token + count)
        if direct is None:
            _gather(cache.key, block_table, head, token, (skipped, count), scratch)
        for low in range(skipped // SIDE * SIDE, count, SIDE):
            if direct is None:
                key_at = gathered.ctypes.data + low * head_dim * 4
            else:
                key_at = _address(cache.key, block_table, head, token + low)
            for d in range(0, head_dim, SIDE):
                transpose_words(
                    key_at + d * 4, head_dim * 4, keys_at + low * 4 + d * key_bytes, key_bytes
                )
        sums = scores.ctypes.data + (token - start) * 4, row_bytes
        if count > NUM_FLOATS:
            add_chains(sums, factors, packed, head_dim, num_rows, 64, 4, True)
        else:
            add_chains(sums, factors, packed, head_dim, num_rows, 32, 4, True)


@compiled(is_inlined=True)
def _address(plane: Any, block_table: Any, head: int, token: int) -> int:
    _, num_heads, block_size, head_dim = plane.shape
    block, offset = block_table[token // block_size], token % block_size
    row = (block * num_heads + head) * block_size + offset
    return plane.ctypes.data + row * head_dim * plane.itemsize


@compiled(is_inlined=True)
def _expect(plane: Any, block_table: Any, head: int, token: int, end: int) -> None:
    """Prefetches a head's keys or values [token, end): no prefetcher follows the block table."""
    block_size, row_bytes = plane.shape[2], plane.shape[3] * plane.itemsize
    while token < end:
        count = min(block_size - token % block_size, end - token)
        at = _address(plane, block_table, head, token)
        for line in range(0, count * row_bytes, LINE_BYTES):
            expect_load(at + line)
        token += count


@compiled(is_inlined=True)
def _gather(plane: Any, block_table: Any, head: int, token: int, places: Any, scratch: Any) -> None:
    """Gathers a head's keys or values into places [first, end) of the tile at `token`, widened to
    FP32, block by block.
    """
    _, gathered, _, _, _, _, _, _ = scratch
    block_size, head_dim = plane.shape[2:]
    done, end = places
    while done < end:
        count = min(block_size - (token + done) % block_size, end - done)
        at = _address(plane, block_table, head, token + done)
        gathered_at = gathered.ctypes.data + done * head_dim * 4
        for i in range(0, count * head_dim, NUM_FLOATS):
            x = load_numbers(at + i * plane.itemsize, plane.dtype, count * head_dim - i)
            store_floats(x, gathered_at + i * 4)
        done += count


@compiled(is_inlined=True)
def _weigh(at: Any, mask: Any, scratch: Any) -> None:
    """Turns scores into weights 2**(score - top), in a second loop: no row waits for its top.

    Their sum runs in NUM_FLOATS interleaved chains over absolute positions, so that skipping keys
    that a row does not attend to changes no bit.
    """
    _, position, num_tokens, group, low, lowest = at
    _, _, _, scores, tops, totals, _, _ = scratch
    start = _start(lowest)
    row_bytes = _whole(position + num_tokens - start, TILE) * 4
    if mask.softcap > 0.0:
        _cap(scores.ctypes.data, num_tokens * group * row_bytes // 4, mask.softcap)
    row_at, row = scores.ctypes.data, 0
    for token in range(num_tokens):
        last = position + token + 1 - start
        first = _lowest(low + token, mask) - start
        for _ in range(group):
            seen = same(_f32(-np.inf))
            for i in range(first // NUM_FLOATS * NUM_FLOATS, last, NUM_FLOATS):
                seen = larger(_seen(row_at, i, first, last), seen)
            tops[row] = largest(seen)
            row_at += row_bytes
            row += 1
    num_columns = _whole(position + num_tokens - start, NUM_FLOATS)
    row_at, row = scores.ctypes.data, 0
    for token in range(num_tokens):
        last = position + token + 1 - start
        first = _lowest(low + token, mask) - start
        for _ in range(group):
            summed = same(_f32(0.0))
            for i in range(0, num_columns, NUM_FLOATS):
                if i + NUM_FLOATS <= first or i >= last:
                    weights = same(_f32(0.0))
                else:
                    seen = _seen(row_at, i, first, last)
                    weights = exp2_floats(seen - tops[row])
                    summed = summed + weights
                store_floats(weights, row_at + i * 4)
            totals[row] = total(summed)
            row_at += row_bytes
            row += 1


@compiled(is_inlined=True)
def _seen(row_at: int, column: int, first: int, last: int) -> Any:
    """Loads the scores of columns from `column` on, of which [first, last) are visible."""
    seen = load_floats(row_at + column * 4)
    if column < first or column + NUM_FLOATS > last:
        seen = masked(seen, first - column, last - column)
    return seen


@compiled()
def _cap(scores_at: int, num_scores: int, softcap: Any) -> None:
    """Replaces each score by softcap · tanh(score / softcap), as an exponent of 2."""
    for i in range(0, num_scores, NUM_FLOATS):
        at = scores_at + i * 4
        x = tanh_floats(load_floats(at) / softcap) * softcap
        store_floats(x * _f32(LOG2_E), at)


@compiled(is_inlined=True)
def _add_values(cache: Any, block_table: Any, at: Any, direct: Any, scratch: Any) -> None:
    """Adds weights · values, in one chain for each SEGMENT of absolute positions."""
    head, position, num_tokens, group, _, lowest = at
    _, gathered, _, scores, _, _, chain, sums = scratch
    block_size, head_dim = cache.value.shape[2:]
    start, end, num_rows = _start(lowest), position + num_tokens, num_tokens * group
    width, row_bytes = _whole(head_dim, SIDE), _whole(end - start, TILE) * 4
    into = chain.ctypes.data, width * 4
    for token in range(start, end, TILE):
        count, skipped = min(TILE, end - token), max(0, lowest - token)
        weights_at = scores.ctypes.data + (token - start) * 4
        if direct is None:
            _gather(cache.value, block_table, head, token, (skipped, count), scratch)
            weights = weights_at + skipped * 4, row_bytes
            values = gathered.ctypes.data + skipped * head_dim * 4, head_dim * 4
            _add_rows(into, weights, values, count - skipped, num_rows, width)
        else:
            done = skipped
            while done < count:
                piece = min(block_size - (token + done) % block_size, count - done)
                values = _address(cache.value, block_table, head, token + done), head_dim * 4
                weights = weights_at + done * 4, row_bytes
                _add_rows(into, weights, values, piece, num_rows, width)
                done += piece
        if (token + TILE) % SEGMENT == 0:
            for i in range(0, num_rows * width, NUM_FLOATS):
                chain_at = chain.ctypes.data + i * 4
                sums_at = sums.ctypes.data + i * 4
                store_floats(load_floats(sums_at) + load_floats(chain_at), sums_at)
                store_floats(same(_f32(0.0)), chain_at)


@compiled(is_inlined=True)
def _divide(scratch: Any, head: int, low: int, num_tokens: int, sinks: Any, out: Any) -> None:
    _, _, _, _, tops, totals, chain, sums = scratch
    _, num_heads, group, head_dim = out.shape
    width = _whole(head_dim, SIDE)
    for token in range(num_tokens):
        for member in range(group):
            row = token * group + member
            factor = _f32(1.0) / totals[row]
            if len(sinks):
                factor = sink_factor(tops[row], totals[row], sinks[head * group + member])
            place = ((low + token) * num_heads + head) * group + member
            out_at = out.ctypes.data + place * head_dim * out.itemsize
            for d in range(0, head_dim, NUM_FLOATS):
                offset = (row * width + d) * 4
                x = load_floats(sums.ctypes.data + offset)
                x = x + load_floats(chain.ctypes.data + offset)
                store_numbers(x * factor, out_at + d * out.itemsize, out.dtype, head_dim - d)


@compiled()
def _add_rows(sums: Any, factors: Any, rows: Any, num_rows: int, num_sums: int, width: int) -> None:
    """sums [num_sums, width] += factors [num_sums, num_rows] · rows, in as few chains as possible.

    Arrays are (address, row stride in bytes).
    """
    sums_at, sums_bytes = sums
    rows_at, row_bytes = rows
    d = 0
    while d < width:
        into, of = (sums_at + d * 4, sums_bytes), (rows_at + d * 4, row_bytes)
        if d + 64 <= width:
            add_chains(into, factors, of, num_rows, num_sums, 64, 4, False)
            d += 64
        elif d + 32 <= width:
            add_chains(into, factors, of, num_rows, num_sums, 32, 4, False)
            d += 32
        else:
            add_chains(into, factors, of, num_rows, num_sums, 16, 4, False)
            d += 16
