"""Attention of runs of new tokens over their paged contexts, causal: softmax(q·Kᵀ·scale)·V.

A program computes a tile of rows of one sequence and KV head; a row is a query head of a token, and
the heads that share a KV head are adjacent, so that a tile reads each key and value once for all.
Only the device has the number of tiles: the grid is an upper bound, and a program finds its
sequence by a binary search.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import INDICES, expect
from kernels.gpu.attention.attention_tile import (
    SEGMENT,
    attend,
    block_n,
    columns_of,
    expect_attention,
    heads_per_tile,
    load_tail,
    merge,
    normalized,
    scales,
    with_sinks,
)
from kernels.integers import cdiv, next_power_of_2


def prefill_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
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
    """Computes kernels.reference.prefill_attention with Triton. Raises BadTensor."""
    expect_attention(
        query, kv_cache, block_tables, context_lens, scale, kv_scales, lower, sinks, value_dim
    )
    num_seqs, num_tokens = context_lens.shape[0], query.shape[0]
    expect(
        *("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,)),
        dtype=INDICES,
        device=query.device,
        is_contiguous=True,
    )
    num_kv_heads, block_size, head_dim = kv_cache.shape[2:]
    columns = columns_of(head_dim, value_dim)
    num_heads, width = query.shape[1], columns.value_dim
    out = query.new_empty((num_tokens, num_heads, width))
    if not out.numel():
        return out
    tile_heads, tiles = heads_per_tile(num_heads // num_kv_heads, value_dim)
    is_wide = query.dtype == torch.float32 or value_dim is not None
    block_m = max(64 if is_wide else 128, next_power_of_2(tile_heads))
    tile_tokens = block_n(width, query.dtype, query.device, is_batch_invariant)
    num_tiles = cdiv(num_tokens, block_m // tile_heads) + num_seqs  # enough for any lengths
    has_segments = is_batch_invariant and block_tables.shape[1] * block_size > SEGMENT
    done = torch.empty_like(out, dtype=torch.float32) if has_segments else None
    _prefill_attention_kernel[(num_tiles, num_kv_heads * tiles)](
        *(query, kv_cache, block_tables, cu_seqlens_q, context_lens, lower, kv_scales, out, done),
        *(query.stride(0), query.stride(1), kv_cache.stride(0), block_tables.stride(0)),
        *(out.stride(0), num_seqs, scale, softcap),
        *(*columns, block_size, tile_heads, tiles, block_m),
        *(tile_tokens, SEGMENT if has_segments else None),
        sinks_ptr=sinks,
        num_warps=8,  # 16 rows each: sums and scores just fit into their registers
        num_stages=3,
        enable_fp_fusion=False,
    )
    return out


@triton.jit(do_not_specialize=["num_seqs", "stride_table"])  # they change from step to step
def _prefill_attention_kernel(
    query_ptr,
    kv_cache_ptr,
    block_tables_ptr,
    cu_seqlens_q_ptr,
    context_lens_ptr,
    lower_ptr,
    kv_scales_ptr,
    out_ptr,
    done_ptr,
    stride_query_token,
    stride_query_head,
    stride_value: tl.int64,  # distance of a key and its value; more than 32 bits in large caches
    stride_table,
    stride_out_token,
    num_seqs,
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
    SEGMENT: tl.constexpr,
    sinks_ptr=None,
):
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    # Heavy tiles first: a sequence's last tokens attend to the most tokens.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)  # number of a tile of GROUP query heads
    kv_head, num_kv_heads = head // TILES, tl.num_programs(1) // TILES
    seq = _sequence_of(tile, cu_seqlens_q_ptr, num_seqs, TILE_TOKENS)
    begin = tl.load(cu_seqlens_q_ptr + seq).to(tl.int32)
    query_len = tl.load(cu_seqlens_q_ptr + seq + 1).to(tl.int32) - begin
    # Index among the sequence's new tokens
    token = (tile - begin // TILE_TOKENS - seq) * TILE_TOKENS
    if token >= query_len:
        return
    before = tl.load(context_lens_ptr + seq).to(tl.int32) - query_len
    column = tl.arange(0, BLOCK_D)[None, :]  # [1, BLOCK_D]
    first_row, offset, is_inside = _rows(
        *(cu_seqlens_q_ptr, seq, tile, head, stride_query_token, stride_query_head),
        *(VALUE_DIM, GROUP, BLOCK_M, BLOCK_D),
    )
    q_ptr = query_ptr + first_row
    q = tl.load(q_ptr + (offset[:, None] + column), mask=is_inside, other=0.0)
    tail = q
    if BLOCK_TAIL > 0:
        tail = load_tail(q_ptr, offset, is_inside, HEAD_DIM, VALUE_DIM, BLOCK_TAIL)

    score_scale, value_scale = scales(scale, softcap, kv_scales_ptr, kv_head, num_kv_heads)
    key_ptr = kv_cache_ptr + kv_head.to(tl.int64) * (BLOCK_SIZE * HEAD_DIM)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_table
    paged = (key_ptr, None, table_ptr, num_kv_heads * BLOCK_SIZE)
    if not IS_LATENT:
        paged = (key_ptr, key_ptr + stride_value, table_ptr, num_kv_heads * BLOCK_SIZE)

    position = before + token + tl.arange(0, BLOCK_M) // GROUP  # [BLOCK_M]
    first_position = before + token
    stop = tl.maximum(tl.minimum(first_position + TILE_TOKENS, before + query_len), 0)
    end_full = (first_position + 1) // BLOCK_N * BLOCK_N
    lowest = 0
    first_full = 0
    scoring = (score_scale, softcap, lower_ptr)
    if lower_ptr is not None:
        last = begin + tl.minimum(token + TILE_TOKENS, query_len) - 1
        index = tl.minimum(begin + token + tl.arange(0, BLOCK_M) // GROUP, last)
        scoring = (score_scale, softcap, tl.load(lower_ptr + index))
        lowest = tl.load(lower_ptr + begin + token)
        first_full = tl.cdiv(tl.load(lower_ptr + last), BLOCK_N) * BLOCK_N
    if SEGMENT is None:
        span = (lowest, first_full, end_full, stop)
        top, total, acc = attend(
            *(q, tail, position, span, paged, scoring),
            *(HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_N),
        )
    else:
        # One segment at a time, as in decode_attention, joined in the same order. Earlier sums stay
        # in memory: two sums of a tile do not fit into registers.
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        first = lowest // SEGMENT * SEGMENT
        for start in tl.range(first, stop, SEGMENT):
            end = tl.minimum(start + SEGMENT, stop)
            span = (tl.maximum(lowest, start), first_full, end_full, end)
            segment = attend(
                *(q, tail, position, span, paged, scoring),
                *(HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_N),
            )
            first_row, offset, is_inside = _rows(
                *(cu_seqlens_q_ptr, seq, tile, head, stride_out_token, VALUE_DIM),
                *(VALUE_DIM, GROUP, BLOCK_M, BLOCK_D),
            )
            done_at = done_ptr + first_row + (offset[:, None] + column)
            is_later = tl.full((1, 1), start - first, tl.int32) > 0
            done = tl.load(done_at, mask=is_inside & is_later, other=0.0)
            top, total, acc = merge((top, total, done), segment)
            tl.store(done_at, acc, mask=is_inside)
            tl.debug_barrier()  # an element may be loaded by another thread than stored it
    first_row, offset, is_inside = _rows(
        *(cu_seqlens_q_ptr, seq, tile, head, stride_out_token, VALUE_DIM),
        *(VALUE_DIM, GROUP, BLOCK_M, BLOCK_D),
    )
    if sinks_ptr is not None:
        heads = head * GROUP + tl.arange(0, BLOCK_M) % GROUP
        top, total, acc = with_sinks((top, total, acc), sinks_ptr, heads)
    out = normalized(total, acc, value_scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + first_row + (offset[:, None] + column), out, mask=is_inside)


@triton.jit
def _rows(
    cu_seqlens_q_ptr,
    seq,
    tile,
    head,
    stride_token,
    stride_head,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Returns the first of a tile's rows, the offsets of all from there [BLOCK_M], and which of
    their elements exist [BLOCK_M, BLOCK_D]. One address serves all rows.

    Recomputed wherever needed: values that live across the loops would take registers of the sums.
    """
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    begin = tl.load(cu_seqlens_q_ptr + seq, volatile=True).to(tl.int32)
    end = tl.load(cu_seqlens_q_ptr + seq + 1, volatile=True).to(tl.int32)
    row = tl.arange(0, BLOCK_M)
    first = begin + (tile - begin // TILE_TOKENS - seq) * TILE_TOKENS
    is_row = row // GROUP < tl.minimum(end - first, TILE_TOKENS)
    is_inside = is_row[:, None] & (tl.arange(0, BLOCK_D)[None, :] < VALUE_DIM)
    offset = row // GROUP * stride_token + row % GROUP * stride_head
    return (
        first.to(tl.int64) * stride_token + head.to(tl.int64) * (GROUP * stride_head),
        offset,
        is_inside,
    )


@triton.jit
def _sequence_of(tile, cu_seqlens_q_ptr, num_seqs, TILE_TOKENS: tl.constexpr):
    """The last sequence whose tiles begin at or before `tile`.

    Sequence i's tiles begin at cu_seqlens_q[i] // TILE_TOKENS + i, which leaves room for the last,
    partial tile of each sequence.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        begin = tl.load(cu_seqlens_q_ptr + middle).to(tl.int32) // TILE_TOKENS + middle
        if begin <= tile:
            low = middle
        else:
            high = middle
    return low
