"""The row-wise operations of a decoder layer, before and after its attention.

One call computes everything before attention and one everything after it, instead of one call per
operation. With many rows each thread computes a share of the rows through all operations: a chunk
of rows stays in its core's L2 cache from one GEMM to the next. With few rows, reading the
weights dominates, so the threads share each GEMM's columns. A row has the same bits both ways,
equal to those of the single operations (`linear`, `add_rms_norm`, `rotate_and_store`, `gated`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import prange
from torch import Tensor

from kernels.cpu.compile import compiled
from kernels.cpu.gemm.gemm_common import (
    BLOCK,
    LEVELS,
    SUM_BYTES,
    chunk_rows,
    num_blocks,
    num_steps,
    padded,
    plain_rows,
    work_bytes,
    work_rows,
)
from kernels.cpu.gemm.lane_linear import is_blocked, lane_steps
from kernels.cpu.gemm.packed_linear import for_gemm, multiply_rows
from kernels.cpu.layer.layer_rows import (
    add_normed,
    add_or_keep,
    gate_products,
    norm_rows,
    place_heads,
)
from kernels.cpu.simd.amx_tiles import aligned
from kernels.cpu.simd.intrinsics import array
from kernels.cpu.simd.tasks import num_tasks
from kernels.sum_lanes import SumLanes

# Least rows of a thread: reading all weights in every thread costs more time than it saves if there
# are fewer.
MANY_ROWS = 160


class PreAttention(NamedTuple):
    """The parameters of a layer before its attention, except the QKV weight."""

    norm: Any  # [hidden]
    eps: Any  # FP32
    has_unit_offset: bool
    bias: Any  # [N], or [0] for none
    query_norm: Any  # [D], or [0]
    key_norm: Any


class PostAttention(NamedTuple):
    """The parameters of a layer after its attention, except the weights."""

    norm: Any  # [hidden]
    attention_norm: Any  # applied to attention's output, [hidden], or [0]
    mlp_norm: Any  # applied to the MLP's output
    eps: Any
    has_unit_offset: bool
    is_gelu: bool


class Weights(NamedTuple):
    """Each in the form that `sum_steps` takes."""

    qkv: Any
    output: Any
    gate_up: Any
    down: Any


@dataclass(frozen=True, slots=True)
class PackedLayer:
    _before: PreAttention
    _behind: PostAttention
    _weights: Weights
    _lanes: tuple[Any, Any]  # lanes of the output and down weights: borders [L + 1] in steps of K

    def pre_attention(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        *,
        is_by_rows: bool | None = None,
    ) -> Tensor:
        """x [T, hidden] -> rotated queries [T, num_heads, D]; writes keys and values to the cache.

        cos, sin [T, rotary_dim / 2] FP32; kv_cache and slot_mapping as in `rotate_and_store`.
        `is_by_rows`: None chooses by the number of rows; True or False forces the way.
        """
        num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
        num_heads = num_blocks(self._weights.qkv) * BLOCK // head_dim - 2 * num_kv_heads
        query = x.new_empty(x.shape[0], num_heads, head_dim)
        key, value = kv_cache.unbind(0)
        is_by_rows = _goes_by_rows(x) if is_by_rows is None else is_by_rows
        run = _pre_attention_by_rows if is_by_rows else _pre_attention_by_columns
        run(
            array(x),
            self._weights.qkv,
            self._before,
            cos.contiguous().numpy(),
            sin.contiguous().numpy(),
            slot_mapping.contiguous().numpy(),
            array(query),
            array(key),
            array(value),
            _num_tasks(x, is_by_rows=is_by_rows),
        )
        return query

    def post_attention(
        self, x: Tensor, attended: Tensor, *, is_by_rows: bool | None = None
    ) -> Tensor:
        """x [T, hidden], attended [T, num_heads, D] -> the layer's output [T, hidden]."""
        y = torch.empty_like(x)
        is_by_rows = _goes_by_rows(x) if is_by_rows is None else is_by_rows
        run = _post_attention_by_rows if is_by_rows else _post_attention_by_columns
        rows, num_tasks = array(attended.flatten(1)), _num_tasks(x, is_by_rows=is_by_rows)
        run(array(x), rows, *self._weights[1:], *self._lanes, self._behind, array(y), num_tasks)
        return y


def _goes_by_rows(x: Tensor) -> bool:
    """Whether to compute by rows: for many rows, once this process has loaded the code. Waiting for
    the compiler is not worthwhile, as columns give the same bits.
    """
    has_many_rows = len(x) >= MANY_ROWS * numba.get_num_threads()
    return has_many_rows and bool(_post_attention_by_rows.overloads)


def _num_tasks(x: Tensor, *, is_by_rows: bool) -> int:
    """Returns the number of tasks. A task by rows reads all weights, so there are no more of these
    than threads.
    """
    return numba.get_num_threads() if is_by_rows else num_tasks(x.shape[1] // BLOCK)


def packed_layer(
    norms: tuple[Tensor, Tensor],
    weights: Sequence[Any],
    lanes: tuple[SumLanes, SumLanes],
    *,
    qkv_bias: Tensor | None,
    head_norms: Sequence[Tensor],
    post_norms: Sequence[Tensor],
    eps: float,
    has_unit_offset: bool,
    activation: str,
) -> PackedLayer | None:
    """Returns a layer with packed weights, or None if one of them is not packed for GEMMs.

    The `weights` are QKV; output; gate and up; down. `lanes` are those of the sums over K of output
    and down. `norms` [hidden] come before attention and before the MLP; `head_norms` [D] are those
    of queries and keys, or none; `post_norms` [hidden] follow attention and the MLP, or none.
    """
    found = [for_gemm(each) for each in weights]
    if any(each is None for each in found) or not all(map(is_blocked, lanes)):
        return None
    none = array(norms[0][:0])
    bias = none if qkv_bias is None else array(qkv_bias)
    query_norm, key_norm = map(array, head_norms) if head_norms else (none, none)
    attention_norm, mlp_norm = map(array, post_norms) if post_norms else (none, none)
    shared = np.float32(eps), has_unit_offset
    return PackedLayer(
        PreAttention(array(norms[0]), *shared, bias, query_norm, key_norm),
        PostAttention(array(norms[1]), attention_norm, mlp_norm, *shared, activation != "silu"),
        Weights(*found),
        (lane_steps(lanes[0]), lane_steps(lanes[1])),
    )


@compiled(parallel=True)
def _pre_attention_by_rows(
    x: Any,
    qkv: Any,
    pre_attention: Any,
    cos: Any,
    sin: Any,
    slots: Any,
    query: Any,
    key: Any,
    value: Any,
    num_tasks: int,
) -> None:
    hidden, size, most_rows = x.shape[1], x.itemsize, chunk_rows(x.itemsize)
    num_columns = num_blocks(qkv)
    for task in prange(num_tasks):
        normed = aligned(work_bytes(most_rows, hidden, size))
        heads = np.empty((most_rows, query.shape[1] + 2 * key.shape[1], query.shape[2]), x.dtype)
        sums = aligned(most_rows * SUM_BYTES)
        first, end = share_of_rows(len(x), task, num_tasks)
        for low in range(first, end, most_rows):
            high = min(low + most_rows, end)
            num_rows = high - low
            rows = work_rows(normed.ctypes.data, hidden, size)
            norm_rows(x, low, high, pre_attention, rows, 0)
            multiply_rows(rows, num_rows, qkv, 0, num_columns, sums, heads, x.dtype)
            place_heads(heads, low, 0, num_rows, pre_attention, cos, sin, slots, query, key, value)


@compiled(parallel=True)
def _pre_attention_by_columns(
    x: Any,
    qkv: Any,
    pre_attention: Any,
    cos: Any,
    sin: Any,
    slots: Any,
    query: Any,
    key: Any,
    value: Any,
    num_tasks: int,
) -> None:
    num_rows, hidden, num_columns, size = len(x), x.shape[1], num_blocks(qkv), x.itemsize
    num_sharing = num_tasks if num_rows > BLOCK else 1
    normed = aligned(work_bytes(num_rows, hidden, size))
    heads = np.empty((num_rows, query.shape[1] + 2 * key.shape[1], query.shape[2]), x.dtype)
    for task in prange(num_sharing):
        first, end = share_of_rows(num_rows, task, num_sharing)
        norm_rows(x, first, end, pre_attention, work_rows(normed.ctypes.data, hidden, size), first)
    for task in prange(num_tasks):
        rows = work_rows(normed.ctypes.data, hidden, size)
        sums = aligned(padded(num_rows) * SUM_BYTES)
        first, end = num_columns * task // num_tasks, num_columns * (task + 1) // num_tasks
        multiply_rows(rows, num_rows, qkv, first, end, sums, heads, x.dtype)
    for task in prange(num_sharing):
        first, end = share_of_rows(num_rows, task, num_sharing)
        place_heads(heads, 0, first, end, pre_attention, cos, sin, slots, query, key, value)


@compiled(parallel=True)
def _post_attention_by_rows(
    x: Any,
    attended: Any,
    output: Any,
    gate_up: Any,
    down: Any,
    output_lanes: Any,
    down_lanes: Any,
    post_attention: Any,
    y: Any,
    num_tasks: int,
) -> None:
    hidden, inner, size = x.shape[1], num_steps(down) * BLOCK, x.itemsize
    num_columns, num_inner = hidden // BLOCK, inner // BLOCK
    most_rows = chunk_rows(size)
    for task in prange(num_tasks):
        normed = aligned(work_bytes(most_rows, hidden, size))
        gated = aligned(work_bytes(most_rows, inner, size))
        added = np.empty((1, most_rows, min(len(post_attention.mlp_norm), hidden)), x.dtype)
        sums = aligned(LEVELS * padded(most_rows) * SUM_BYTES)
        first, end = share_of_rows(len(x), task, num_tasks)
        for low in range(first, end, most_rows):
            high = min(low + most_rows, end)
            num_rows, x_rows, y_rows = high - low, x[low:high], y[low:high]
            rows = plain_rows(attended[low:].ctypes.data, attended.shape[1], size)
            add_or_keep(
                rows,
                num_rows,
                output,
                output_lanes,
                0,
                num_columns,
                sums,
                added,
                x_rows,
                y_rows,
            )
            add_normed(
                added, 0, num_rows, post_attention.attention_norm, post_attention, x_rows, y_rows
            )
            normed_rows = work_rows(normed.ctypes.data, hidden, size)
            norm_rows(y_rows, 0, num_rows, post_attention, normed_rows, 0)
            rows = work_rows(gated.ctypes.data, inner, size)
            is_gelu = post_attention.is_gelu
            gate_products(
                normed_rows, num_rows, gate_up, is_gelu, 0, num_inner, sums, rows, x.dtype
            )
            add_or_keep(
                rows, num_rows, down, down_lanes, 0, num_columns, sums, added, y_rows, y_rows
            )
            add_normed(added, 0, num_rows, post_attention.mlp_norm, post_attention, y_rows, y_rows)


@compiled(parallel=True)
def _post_attention_by_columns(
    x: Any,
    attended: Any,
    output: Any,
    gate_up: Any,
    down: Any,
    output_lanes: Any,
    down_lanes: Any,
    post_attention: Any,
    y: Any,
    num_tasks: int,
) -> None:
    num_rows, hidden, inner, size = len(x), x.shape[1], num_steps(down) * BLOCK, x.itemsize
    normed = aligned(work_bytes(num_rows, hidden, size))
    gated = aligned(work_bytes(num_rows, inner, size))
    added = np.empty((1, num_rows, min(len(post_attention.mlp_norm), hidden)), x.dtype)
    num_columns, num_inner = hidden // BLOCK, inner // BLOCK
    num_sharing = num_tasks if num_rows > BLOCK else 1
    for task in prange(num_tasks):
        rows = plain_rows(attended.ctypes.data, attended.shape[1], size)
        sums = aligned(LEVELS * padded(num_rows) * SUM_BYTES)
        first, end = num_columns * task // num_tasks, num_columns * (task + 1) // num_tasks
        add_or_keep(rows, num_rows, output, output_lanes, first, end, sums, added, x, y)
    for task in prange(num_sharing):
        first, end = share_of_rows(num_rows, task, num_sharing)
        add_normed(added, first, end, post_attention.attention_norm, post_attention, x, y)
        norm_rows(y, first, end, post_attention, work_rows(normed.ctypes.data, hidden, size), first)
    for task in prange(num_tasks):
        normed_rows = work_rows(normed.ctypes.data, hidden, size)
        rows = work_rows(gated.ctypes.data, inner, size)
        sums = aligned(2 * padded(num_rows) * SUM_BYTES)
        first, end = num_inner * task // num_tasks, num_inner * (task + 1) // num_tasks
        is_gelu = post_attention.is_gelu
        gate_products(normed_rows, num_rows, gate_up, is_gelu, first, end, sums, rows, x.dtype)
    for task in prange(num_tasks):
        rows = work_rows(gated.ctypes.data, inner, size)
        sums = aligned(LEVELS * padded(num_rows) * SUM_BYTES)
        first, end = num_columns * task // num_tasks, num_columns * (task + 1) // num_tasks
        add_or_keep(rows, num_rows, down, down_lanes, first, end, sums, added, y, y)
    for task in prange(num_sharing if added.size else 0):
        first, end = share_of_rows(num_rows, task, num_sharing)
        add_normed(added, first, end, post_attention.mlp_norm, post_attention, y, y)


@compiled()
def share_of_rows(num_rows: int, task: int, num_tasks: int) -> Any:
    """[first, end): full blocks, except possibly the last block of the last task."""
    first = (num_rows * task // num_tasks + BLOCK // 2) // BLOCK * BLOCK
    end = (num_rows * (task + 1) // num_tasks + BLOCK // 2) // BLOCK * BLOCK
    return min(first, num_rows), num_rows if task == num_tasks - 1 else min(end, num_rows)
