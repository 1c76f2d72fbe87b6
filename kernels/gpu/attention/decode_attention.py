"""Attention of one new token per sequence over its paged context: softmax(q·Kᵀ·scale)·V.

Bound by reading keys and values: the query heads that share a KV head are the rows of one tile,
and contexts are split so that every processor reads all the time. Splits depend on the lengths,
which only the device has: each program derives the same plan from them and finds its part in it.
A second kernel joins the parts of a sequence, in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import expect
from kernels.device import num_processors
from kernels.gpu.attention.attention_tile import (
    MOST_LATENT_HEADS,
    SEGMENT,
    attend,
    block_n,
    columns_of,
    expect_attention,
    heads_per_tile,
    load_tail,
    merge,
    normalized,
    padded,
    scales,
    with_sinks,
)
from kernels.integers import cdiv, next_power_of_2

PROGRAMS_PER_PROCESSOR = 6  # two or three run at a time: loads of one cover the ends of the others
PARTS_AT_ONCE = 16  # concurrent loads in the kernel that joins


def decode_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    lower: Tensor | None = None,
    softcap: float | None = None,
    kv_scales: Tensor | None = None,
    value_dim: int | None = None,
    sinks: Tensor | None = None,
    is_batch_invariant: bool = False,
) -> Tensor:
    """Computes kernels.reference.decode_attention with Triton. Raises BadTensor."""
    expect_attention(
        query, kv_cache, block_tables, context_lens, scale, kv_scales, lower, sinks, value_dim
    )
    num_seqs, num_heads, head_dim = query.shape
    expect("context_lens", context_lens, (num_seqs,))
    columns = columns_of(head_dim, value_dim)
    width = columns.value_dim
    out = query.new_empty((num_seqs, num_heads, width))
    if not out.numel():
        return out
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    tile_heads, tiles = heads_per_tile(group, value_dim)
    tile_tokens = _tile_tokens(query, kv_cache, width, is_batch_invariant)
    max_units = cdiv(
        block_tables.shape[1] * block_size, SEGMENT if is_batch_invariant else tile_tokens
    )
    num_tiles = num_kv_heads * tiles
    num_splits = cdiv(PROGRAMS_PER_PROCESSOR * num_processors(query.device), num_tiles)
    num_splits = max(1, min(num_splits, num_seqs * max_units))
    num_items = num_splits + num_seqs  # every sequence may need one more than its share
    num_parts = num_seqs * max_units if is_batch_invariant else num_items
    parts = sums = None
    if max_units > 1:
        parts = query.new_empty((num_parts, num_heads, width), dtype=torch.float32)
        sums = query.new_empty((2, num_parts, num_heads), dtype=torch.float32)
    # Invariant: at least the rows of a warp group, as in prefill_attention.
    block_m = max(64 if is_batch_invariant else 16, next_power_of_2(tile_heads))
    unit = SEGMENT if is_batch_invariant else tile_tokens
    plan = _block_seqs(num_seqs), unit, is_batch_invariant  # BLOCK_SEQS, UNIT, IS_INVARIANT
    _decode_attention_kernel[(num_tiles, num_items)](
        *(query, kv_cache, block_tables, context_lens, lower, kv_scales, out, parts, sums),
        *(query.stride(0), query.stride(1), kv_cache.stride(0), block_tables.stride(0)),
        *(num_seqs, num_splits, max_units, num_parts, scale, softcap),
        *(*columns, block_size, tile_heads, tiles, block_m, tile_tokens, *plan),
        sinks_ptr=sinks,
        num_warps=_num_warps(block_m, query.dtype, value_dim, is_batch_invariant),
        num_stages=3,
        enable_fp_fusion=False,
    )
    if parts is not None:
        _join_kernel[(num_seqs, num_heads)](
            *(context_lens, lower, kv_scales, out, parts, sums),
            *(num_seqs, num_splits, max_units, num_parts),
            *(width, group, columns.block_d, PARTS_AT_ONCE, *plan),
            sinks_ptr=sinks,
            num_warps=max(1, columns.block_d // 32),
            enable_fp_fusion=False,
        )
    return out


def _tile_tokens(query: Tensor, kv_cache: Tensor, width: int, is_batch_invariant: bool) -> int:
    """16 KiB of keys per tile: two or three programs of several stages can share a processor."""
    if is_batch_invariant:
        return block_n(width, query.dtype, query.device, is_batch_invariant)
    row_bytes = padded(width) * kv_cache.dtype.itemsize
    return max(16, min(128, 16384 // row_bytes))


def _block_seqs(num_seqs: int) -> int:
    """16, 64, 256, ...: few compiled kernels for all sizes of a batch."""
    block = 16
    while block < num_seqs:
        block *= 4
    return block


def _num_warps(
    block_m: int, dtype: torch.dtype, value_dim: int | None, is_batch_invariant: bool
) -> int:
    """Invariant: as in prefill_attention, where rows have the same layout in warps, and the same
    sum order. Otherwise more only where the sums of full tiles over latents need the registers.
    """
    if not is_batch_invariant:
        return 8 if value_dim is not None and block_m >= MOST_LATENT_HEADS else 4
    return 8 if dtype == torch.float32 or value_dim is not None else block_m // 16


# These depend on the batch's shape, which changes at each step: not specialised on.
VARYING = ["num_seqs", "num_splits", "max_units", "num_parts", "stride_table"]


@triton.jit(do_not_specialize=VARYING)
def _decode_attention_kernel(
    query_ptr,
    kv_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    lower_ptr,
    kv_scales_ptr,
    out_ptr,
    parts_ptr,
    sums_ptr,
    stride_query_seq,
    stride_query_head,
    stride_value: tl.int64,  # distance of a key and its value; more than 32 bits in large caches
    stride_table,
    num_seqs,
    num_splits,
    max_units,
    num_parts,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    IS_LATENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    UNIT: tl.constexpr,
    IS_INVARIANT: tl.constexpr,
    sinks_ptr=None,
):
    head = tl.program_id(0)  # number of a tile of GROUP query heads
    kv_head, num_kv_heads = head // TILES, tl.num_programs(0) // TILES
    item = tl.program_id(1)
    units, share, ends = _plan(
        *(context_lens_ptr, lower_ptr, num_seqs, num_splits),
        *(BLOCK_SEQS, UNIT),
    )
    if item >= tl.max(ends):
        return
    is_before = ends <= item
    seq = tl.sum(is_before.to(tl.int32))
    split = item - tl.max(tl.where(is_before, ends, 0))
    num_units = _at(units, seq)
    num_own = _at(share, seq)
    length = tl.load(context_lens_ptr + seq).to(tl.int32)
    lowest = _lowest(lower_ptr, seq)
    first_unit = lowest // UNIT + split * num_own
    end_unit = tl.minimum(first_unit + num_own, lowest // UNIT + num_units)

    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)[None, :]  # [1, BLOCK_D]
    is_inside = (row < GROUP)[:, None] & (column < VALUE_DIM)  # [BLOCK_M, BLOCK_D]
    q_ptr = (
        query_ptr
        + seq.to(tl.int64) * stride_query_seq
        + head.to(tl.int64) * (GROUP * stride_query_head)
    )
    offset = row * stride_query_head
    q = tl.load(q_ptr + (offset[:, None] + column), mask=is_inside, other=0.0)
    tail = q
    if BLOCK_TAIL > 0:
        tail = load_tail(q_ptr, offset, is_inside, HEAD_DIM, VALUE_DIM, BLOCK_TAIL)

    score_scale, value_scale = scales(scale, softcap, kv_scales_ptr, kv_head, num_kv_heads)
    scoring = (score_scale, softcap, lower_ptr)
    if lower_ptr is not None:
        scoring = (score_scale, softcap, tl.full((BLOCK_M,), lowest, tl.int32))
    key_ptr = kv_cache_ptr + kv_head.to(tl.int64) * (BLOCK_SIZE * HEAD_DIM)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_table
    paged = (key_ptr, None, table_ptr, num_kv_heads * BLOCK_SIZE)
    if not IS_LATENT:
        paged = (key_ptr, key_ptr + stride_value, table_ptr, num_kv_heads * BLOCK_SIZE)
    position = tl.full((BLOCK_M,), length - 1, tl.int32)
    first_full = tl.cdiv(lowest, BLOCK_N) * BLOCK_N
    end_full = length // BLOCK_N * BLOCK_N
    num_heads = tl.num_programs(0) * GROUP
    target = (out_ptr, parts_ptr, sums_ptr, sinks_ptr, seq, head, num_heads, num_parts)
    if IS_INVARIANT:
        end_unit = tl.maximum(end_unit, first_unit + 1)
        # What the stores need is computed again for each unit, not retained across its loop.
        for unit in tl.range(first_unit, end_unit, disable_licm=True):
            start = tl.maximum(lowest, unit * UNIT)
            span = (start, first_full, end_full, tl.minimum((unit + 1) * UNIT, length))
            state = attend(
                *(q, tail, position, span, paged, scoring),
                *(HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_N),
            )
            part = seq * max_units + unit
            _store(state, value_scale, target, part, num_units, VALUE_DIM, GROUP)
    else:
        start = tl.maximum(lowest, first_unit * UNIT)
        span = (start, first_full, end_full, tl.minimum(end_unit * UNIT, length))
        state = attend(
            *(q, tail, position, span, paged, scoring),
            *(HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_N),
        )
        num_splits_of_seq = tl.cdiv(num_units, num_own)
        _store(state, value_scale, target, item, num_splits_of_seq, VALUE_DIM, GROUP)


@triton.jit
def _store(
    state,
    value_scale,
    target,
    part,
    num_parts_of_seq,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Stores the result of a sequence with one part, or else the part."""
    top, total, acc = state
    out_ptr, parts_ptr, sums_ptr, sinks_ptr, seq, head, num_heads, num_parts = target
    row = tl.arange(0, acc.shape[0])
    column = tl.arange(0, acc.shape[1])[None, :]
    # One address and the same offsets for all: each row's own would take registers of the sums.
    place = row[:, None] * VALUE_DIM + column
    is_inside = column < VALUE_DIM
    if acc.shape[0] > GROUP:
        is_inside &= row[:, None] < GROUP
    first_head = head * GROUP
    if parts_ptr is not None and num_parts_of_seq > 1:
        first = part.to(tl.int64) * num_heads + first_head
        total_ptr = sums_ptr + num_parts.to(tl.int64) * num_heads
        tl.store(parts_ptr + first * VALUE_DIM + place, acc, mask=is_inside)
        tl.store(sums_ptr + first + row, top, mask=row < GROUP)
        tl.store(total_ptr + first + row, total, mask=row < GROUP)
    else:
        if sinks_ptr is not None:  # rows beyond GROUP are not stored
            top, total, acc = with_sinks(state, sinks_ptr, first_head + row % GROUP)
        out = normalized(total, acc, value_scale).to(out_ptr.dtype.element_ty)
        first = seq.to(tl.int64) * num_heads + first_head
        tl.store(out_ptr + first * VALUE_DIM + place, out, mask=is_inside)


@triton.jit(do_not_specialize=VARYING[:-1])
def _join_kernel(
    context_lens_ptr,
    lower_ptr,
    kv_scales_ptr,
    out_ptr,
    parts_ptr,
    sums_ptr,
    num_seqs,
    num_splits,
    max_units,
    num_parts,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS_AT_ONCE: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    UNIT: tl.constexpr,
    IS_INVARIANT: tl.constexpr,
    sinks_ptr=None,
):
    """Joins the parts of one head of one sequence in order, as if one program had computed all."""
    seq = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    units, share, ends = _plan(
        *(context_lens_ptr, lower_ptr, num_seqs, num_splits),
        *(BLOCK_SEQS, UNIT),
    )
    num_units = _at(units, seq)
    if IS_INVARIANT:
        count = num_units
        first = seq * max_units + _lowest(lower_ptr, seq) // UNIT
    else:
        count = tl.cdiv(num_units, _at(share, seq))
        first = _at(ends, seq) - count
    if count <= 1:
        return
    one = tl.arange(0, 1)  # [1]
    column = tl.arange(0, BLOCK_D)[None, :]  # [1, BLOCK_D]
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, BLOCK_D), tl.float32)
    for done in tl.range(0, count, PARTS_AT_ONCE):
        parts = ()
        for index in tl.static_range(PARTS_AT_ONCE):  # all are loaded before the first is used
            is_part = done + index + one < count
            at = (first + done + index).to(tl.int64) * num_heads + head + one
            total_at = sums_ptr + num_parts.to(tl.int64) * num_heads + at
            acc_at = parts_ptr + at[:, None] * VALUE_DIM + column
            is_inside = is_part[:, None] & (column < VALUE_DIM)
            part = (
                tl.load(sums_ptr + at, mask=is_part, other=float("-inf")),
                tl.load(total_at, mask=is_part, other=0.0),
                tl.load(acc_at, mask=is_inside, other=0.0),
            )
            parts = parts + (part,)  # type: ignore[assignment]  # noqa: RUF005
        for index in tl.static_range(PARTS_AT_ONCE):
            top, total, acc = merge((top, total, acc), parts[index])
    if sinks_ptr is not None:
        top, total, acc = with_sinks((top, total, acc), sinks_ptr, head + one)
    value_scale = 1.0
    if kv_scales_ptr is not None:
        value_scale = tl.load(kv_scales_ptr + num_heads // GROUP + head // GROUP)
    out = normalized(total, acc, value_scale).to(out_ptr.dtype.element_ty)
    at = (seq.to(tl.int64) * num_heads + head) * VALUE_DIM + column
    tl.store(out_ptr + at, out, mask=column < VALUE_DIM)


@triton.jit
def _plan(
    context_lens_ptr,
    lower_ptr,
    num_seqs,
    num_splits,
    BLOCK_SEQS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Returns for each sequence [BLOCK_SEQS]: its units, the units of each of its splits, its last
    split.

    All splits of a batch have nearly the same size, and there are at most num_splits + num_seqs; a
    sequence without tokens has one.
    """
    seq = tl.arange(0, BLOCK_SEQS)
    length = tl.load(context_lens_ptr + seq, mask=seq < num_seqs, other=0).to(tl.int32)
    lowest = length * 0
    if lower_ptr is not None:
        lowest = tl.load(lower_ptr + seq, mask=seq < num_seqs, other=0)
    units = tl.cdiv(length, UNIT) - lowest // UNIT
    largest = tl.maximum(tl.cdiv(tl.sum(units), num_splits), 1)
    splits = tl.maximum(tl.cdiv(units, largest), 1)
    share = tl.maximum(tl.cdiv(units, splits), 1)
    splits = tl.where(seq < num_seqs, tl.maximum(tl.cdiv(units, share), 1), 0)
    return units, share, tl.cumsum(splits)


@triton.jit
def _lowest(lower_ptr, seq):
    """The first token that the last one of a sequence attends to."""
    lowest = seq * 0
    if lower_ptr is not None:
        lowest = tl.load(lower_ptr + seq)
    return lowest


@triton.jit
def _at(x, index):
    """x[index] of x [N]."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == index, x, 0))
