"""Attention of runs of new tokens over their paged contexts, causal: softmax(q·Kᵀ·scale)·V.

The two products run in oneDNN, FP32; the softmax between them is the one of `decode_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from kernels.cpu.amx_attention import amx_attention, can_attend_on_amx
from kernels.cpu.compiled import compiled
from kernels.cpu.decode_attention import SEGMENT
from kernels.cpu.lanes import LANES, LOG2_E, array, join_lanes, widen
from kernels.cpu.linear import linear, pack_weight
from kernels.cpu.softmax import largest_score, weigh_scores
from kernels.reference.prefill_attention import prefill_attention as reference_prefill_attention

MAX_ROWS = 768  # scores of a segment and so many rows stay in a core's cache: 1.5 MiB

_f32 = np.float32


@dataclass(frozen=True, slots=True)
class _Context:
    """One sequence's context from token `start` on, a multiple of SEGMENT, packed by segment."""

    start: int
    keys: list[list[Tensor]]  # [segment][KV head] of [tokens, D]
    values: list[list[Tensor]]  # [segment][KV head] of [D, tokens]


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
    kv_scales: Tensor | None = None,
    is_batch_invariant: bool = False,
) -> Tensor:
    """query [T, num_heads, D], flat over S sequences -> [T, num_heads, D] in its dtype.

    kv_cache [2, num_blocks, num_kv_heads, block_size, D]; block_tables [S, B];
    cu_seqlens_q [S + 1]; context_lens [S], the new tokens included. `window` and `softcap` as in
    `decode_attention`.
    """
    if kv_scales is not None or kv_cache.dtype == torch.float8_e4m3fn:
        return reference_prefill_attention(
            query,
            kv_cache,
            block_tables,
            cu_seqlens_q,
            context_lens,
            scale,
            window=window,
            softcap=softcap,
            kv_scales=kv_scales,
        )
    if can_attend_on_amx(kv_cache):
        return amx_attention(
            query,
            kv_cache,
            block_tables,
            cu_seqlens_q.diff(),
            context_lens,
            scale,
            window=window,
            softcap=softcap,
        )
    num_heads, num_kv_heads, head_dim = query.shape[1], kv_cache.shape[2], query.shape[2]
    group = num_heads // num_kv_heads
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    factor = scale if softcap is not None else scale * LOG2_E
    step = max(MAX_ROWS // group, 1)
    bounds = cu_seqlens_q.tolist()
    for seq, context_len in enumerate(context_lens.tolist()):
        shift = context_len - bounds[seq + 1]  # from a row of `query` to its position
        context = _gather(
            kv_cache, block_tables[seq], _first_visible(bounds[seq] + shift, window), context_len
        )
        for low in range(bounds[seq], bounds[seq + 1], step):
            high = min(low + step, bounds[seq + 1])
            for head in range(num_kv_heads):
                heads = slice(head * group, (head + 1) * group)
                rows = (query[low:high, heads].float() * factor).view(-1, head_dim)
                span = _Span(low + shift, group, window or 0, _f32(softcap or 0.0))
                attended = _attend(rows, context, head, span)
                out[low:high, heads] = attended.view(-1, group, head_dim)
    return out


@dataclass(frozen=True, slots=True)
class _Span:
    """What rows see: row r is token `first` + r // group; `window` and `softcap` 0 mean none."""

    first: int
    group: int
    window: int
    softcap: np.float32


def _first_visible(position: int, window: int | None) -> int:
    """The segment in which the context of a token at `position` begins."""
    return 0 if window is None else max(0, position + 1 - window) // SEGMENT * SEGMENT


def _gather(kv_cache: Tensor, block_table: Tensor, start: int, end: int) -> _Context:
    _, _, num_kv_heads, _, head_dim = kv_cache.shape
    key, value = (array(plane) for plane in kv_cache.unbind(0))
    keys, values = [], []
    for first in range(start, end, SEGMENT):
        num_columns = -(-min(SEGMENT, end - first) // LANES) * LANES
        segment_key = torch.empty((num_kv_heads, num_columns, head_dim))
        segment_value = torch.empty((num_kv_heads, head_dim, num_columns))
        _gather_segment(
            key, value, block_table.numpy(), first, end, segment_key.numpy(), segment_value.numpy()
        )
        keys.append([pack_weight(each) for each in segment_key])
        values.append([pack_weight(each) for each in segment_value])
    return _Context(start, keys, values)


@compiled(parallel=True)
def _gather_segment(
    key: Any, value: Any, block_table: Any, first: int, end: int, keys: Any, values: Any
) -> None:
    """keys [H, columns, D] and values [H, D, columns] of tokens from `first` on; zeros from `end`.

    A block's last owner can have left NaN behind `end`, and 0 · NaN is NaN.
    """
    num_kv_heads, num_columns, head_dim = keys.shape
    block_size = key.shape[2]
    for item in prange(num_kv_heads * num_columns):
        head, column = item // num_columns, item % num_columns
        token = first + column
        if token < end:
            block, offset = block_table[token // block_size], token % block_size
            for d in range(head_dim):
                keys[head, column, d] = widen(key[block, head, offset, d])
                values[head, d, column] = widen(value[block, head, offset, d])
        else:
            for d in range(head_dim):
                keys[head, column, d] = _f32(0.0)
                values[head, d, column] = _f32(0.0)


def _attend(rows: Tensor, context: _Context, head: int, span: _Span) -> Tensor:
    """rows [R, D], scaled -> softmax(rows · keysᵀ) · values, [R, D]."""
    num_rows, group = rows.shape[0], span.group
    last_position = span.first + (num_rows - 1) // group
    num_segments = (last_position - context.start) // SEGMENT + 1
    tops = torch.full((num_rows,), float("-inf"))
    scores = []
    for index in range(num_segments):
        scores.append(linear(rows, context.keys[index][head]))
        first = span.first - context.start - index * SEGMENT
        _find_tops(_pieces(scores[-1]), first, group, span.window, span.softcap, tops.numpy())
    sums = torch.zeros((num_rows, LANES))
    attended = torch.zeros_like(rows)
    for index, weights in enumerate(scores):
        first = span.first - context.start - index * SEGMENT
        _weigh(_pieces(weights), first, group, span.window, tops.numpy(), sums.numpy())
        attended += linear(weights, context.values[index][head])
    _divide(attended.numpy(), sums.numpy())
    return attended


def _pieces(scores: Tensor) -> Any:
    """scores [R, columns] as [R, pieces, LANES]."""
    return scores.view(scores.shape[0], -1, LANES).numpy()


@compiled()
def _visible(row: int, first: int, group: int, window: int, num_columns: int) -> Any:
    """[start, end) of the columns that a row sees; `first` is row 0's position as a column."""
    end = first + row // group + 1
    start = end - window if window else 0
    return min(max(start, 0), num_columns), min(max(end, 0), num_columns)


@compiled(parallel=True)
def _find_tops(scores: Any, first: int, group: int, window: int, softcap: Any, tops: Any) -> None:
    for row in prange(scores.shape[0]):
        start, end = _visible(row, first, group, window, scores.shape[1] * LANES)
        tops[row] = max(tops[row], largest_score(scores, row, start, end, softcap))


@compiled(parallel=True)
def _weigh(scores: Any, first: int, group: int, window: int, tops: Any, sums: Any) -> None:
    for row in prange(scores.shape[0]):
        start, end = _visible(row, first, group, window, scores.shape[1] * LANES)
        weigh_scores(scores, row, start, end, tops[row], sums, row)


@compiled()
def _divide(attended: Any, sums: Any) -> None:
    for row in range(attended.shape[0]):
        total = join_lanes(sums[row])
        for d in range(attended.shape[1]):
            attended[row, d] /= total
