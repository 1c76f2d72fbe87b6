"""A decoder layer around its attention, for BF16 on AMX: all that is done to a token's row alone.

One call for what comes before attention and one for what comes behind it, instead of one for each
operation. Of many rows each thread takes its share through all of it: a chunk of rows stays in its
core's second cache from one product to the next. Of few rows the weights are what takes the time,
so the threads share each product's columns. A row has the same bits both ways, and those of the
single operations (`linear`, `add_rms_norm`, `rotate_and_store`, `gated`).
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

from kernels.cpu.amx import aligned, tile_release
from kernels.cpu.amx_linear import multiply_rows
from kernels.cpu.amx_products import (
    BLOCK,
    CHUNK_ROWS,
    CONFIGS,
    SUM_BYTES,
    num_blocks,
    num_steps,
    padded,
    plain_rows,
    tiled_rows,
)
from kernels.cpu.amx_rows import add_products, gate_products, norm_rows, place_heads
from kernels.cpu.compiled import compiled
from kernels.cpu.compressed_products import for_tiles
from kernels.cpu.lanes import array
from kernels.cpu.tasks import num_tasks

# For each thread. With fewer, reading all weights in every thread takes longer than it saves.
MANY_ROWS = 160


class Before(NamedTuple):
    """What a layer has ahead of its attention, beside the weight of queries, keys and values."""

    norm: Any  # [hidden]
    eps: Any  # FP32
    has_unit_offset: bool
    bias: Any  # [N], or [0] for none
    query_norm: Any  # [D], or [0]
    key_norm: Any


class Behind(NamedTuple):
    """What it has behind it, beside the weights."""

    norm: Any  # [hidden]
    eps: Any
    has_unit_offset: bool
    is_gelu: bool


class Weights(NamedTuple):
    """Each as `sum_products` takes it."""

    qkv: Any
    output: Any
    gate_up: Any
    down: Any


@dataclass(frozen=True, slots=True)
class AmxLayer:
    _before: Before
    _behind: Behind
    _weights: Weights

    def before(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        """x [T, hidden] -> rotated queries [T, num_heads, D]; keys and values go to the cache.

        cos, sin [T, rotary_dim / 2] FP32; kv_cache and slot_mapping as in `rotate_and_store`.
        """
        num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
        num_heads = num_blocks(self._weights.qkv) * BLOCK // head_dim - 2 * num_kv_heads
        query = x.new_empty(x.shape[0], num_heads, head_dim)
        key, value = kv_cache.unbind(0)
        run = _before_by_rows if _has_many_rows(x) else _before_by_columns
        run(
            array(x),
            self._weights.qkv,
            self._before,
            cos.contiguous().numpy(),
            sin.contiguous().numpy(),
            slot_mapping.numpy(),
            array(query),
            array(key),
            array(value),
            CONFIGS,
            _num_tasks(x),
        )
        return query

    def behind(self, x: Tensor, attended: Tensor) -> Tensor:
        """x [T, hidden], attended [T, num_heads, D] -> [T, hidden] behind the layer."""
        y = torch.empty_like(x)
        run = _behind_by_rows if _has_many_rows(x) else _behind_by_columns
        rows = array(attended.flatten(1))
        run(array(x), rows, *self._weights[1:], self._behind, array(y), CONFIGS, _num_tasks(x))
        return y


def _has_many_rows(x: Tensor) -> bool:
    return len(x) >= MANY_ROWS * numba.get_num_threads()


def _num_tasks(x: Tensor) -> int:
    """Of many rows, a task reads all weights: no more of them than threads."""
    return numba.get_num_threads() if _has_many_rows(x) else num_tasks(x.shape[1] // BLOCK)


def amx_layer(
    norms: tuple[Tensor, Tensor],
    weights: Sequence[Any],
    *,
    qkv_bias: Tensor | None,
    head_norms: Sequence[Tensor],
    eps: float,
    has_unit_offset: bool,
    activation: str,
    head_dim: int,
    rotary_dim: int,
) -> AmxLayer | None:
    """`weights`: of queries, keys and values; output; gate and up; down. None where it cannot be.

    `norms`: before attention and before the MLP, [hidden]; `head_norms` [D] of queries and keys, or
    none.
    """
    found = [for_tiles(each) for each in weights]
    if any(each is None for each in found) or head_dim % BLOCK or rotary_dim % (2 * BLOCK):
        return None
    none = array(norms[0][:0])
    bias = none if qkv_bias is None else array(qkv_bias)
    query_norm, key_norm = map(array, head_norms) if head_norms else (none, none)
    shared = np.float32(eps), has_unit_offset
    return AmxLayer(
        Before(array(norms[0]), *shared, bias, query_norm, key_norm),
        Behind(array(norms[1]), *shared, activation != "silu"),
        Weights(*found),
    )


@compiled(parallel=True)
def _before_by_rows(
    x: Any,
    qkv: Any,
    before: Any,
    cos: Any,
    sin: Any,
    slots: Any,
    query: Any,
    key: Any,
    value: Any,
    configs: Any,
    num_tasks: int,
) -> None:
    hidden, num_columns = x.shape[1], num_blocks(qkv)
    for task in prange(num_tasks):
        normed = aligned(CHUNK_ROWS * hidden * 2)
        heads = np.empty((CHUNK_ROWS, query.shape[1] + 2 * key.shape[1], query.shape[2]), np.uint16)
        sums = aligned(CHUNK_ROWS * SUM_BYTES)
        first, end = share_of_rows(len(x), task, num_tasks)
        for low in range(first, end, CHUNK_ROWS):
            high = min(low + CHUNK_ROWS, end)
            num_rows = high - low
            rows = tiled_rows(normed.ctypes.data, hidden)
            norm_rows(x, low, high, before, normed.ctypes.data)
            multiply_rows(rows, num_rows, qkv, 0, num_columns, configs, sums, heads)
            place_heads(heads, low, 0, num_rows, before, cos, sin, slots, query, key, value)
        tile_release()


@compiled(parallel=True)
def _before_by_columns(
    x: Any,
    qkv: Any,
    before: Any,
    cos: Any,
    sin: Any,
    slots: Any,
    query: Any,
    key: Any,
    value: Any,
    configs: Any,
    num_tasks: int,
) -> None:
    num_rows, hidden, num_columns = len(x), x.shape[1], num_blocks(qkv)
    num_sharing = num_tasks if num_rows > BLOCK else 1
    normed = aligned(padded(num_rows) * hidden * 2)
    heads = np.empty((num_rows, query.shape[1] + 2 * key.shape[1], query.shape[2]), np.uint16)
    for task in prange(num_sharing):
        first, end = share_of_rows(num_rows, task, num_sharing)
        norm_rows(x, first, end, before, normed.ctypes.data + first * hidden * 2)
    for task in prange(num_tasks):
        rows = tiled_rows(normed.ctypes.data, hidden)
        sums = aligned(padded(num_rows) * SUM_BYTES)
        first, end = num_columns * task // num_tasks, num_columns * (task + 1) // num_tasks
        multiply_rows(rows, num_rows, qkv, first, end, configs, sums, heads)
        tile_release()
    for task in prange(num_sharing):
        first, end = share_of_rows(num_rows, task, num_sharing)
        place_heads(heads, 0, first, end, before, cos, sin, slots, query, key, value)


@compiled(parallel=True)
def _behind_by_rows(
    x: Any,
    attended: Any,
    output: Any,
    gate_up: Any,
    down: Any,
    behind: Any,
    y: Any,
    configs: Any,
    num_tasks: int,
) -> None:
    hidden, inner = x.shape[1], num_steps(down) * BLOCK
    num_columns, num_inner = hidden // BLOCK, inner // BLOCK
    for task in prange(num_tasks):
        normed = aligned(CHUNK_ROWS * hidden * 2)
        gated = aligned(CHUNK_ROWS * inner * 2)
        sums = aligned(2 * CHUNK_ROWS * SUM_BYTES)
        first, end = share_of_rows(len(x), task, num_tasks)
        for low in range(first, end, CHUNK_ROWS):
            high = min(low + CHUNK_ROWS, end)
            num_rows = high - low
            x_rows, y_rows = x[low:high], y[low:high]
            rows = plain_rows(attended[low:].ctypes.data, attended.shape[1])
            add_products(rows, num_rows, output, 0, num_columns, configs, sums, x_rows, y_rows)
            norm_rows(y_rows, 0, num_rows, behind, normed.ctypes.data)
            rows = tiled_rows(normed.ctypes.data, hidden)
            gate_products(
                rows, num_rows, gate_up, behind.is_gelu, 0, num_inner, configs, sums, gated
            )
            rows = tiled_rows(gated.ctypes.data, inner)
            add_products(rows, num_rows, down, 0, num_columns, configs, sums, y_rows, y_rows)
        tile_release()


@compiled(parallel=True)
def _behind_by_columns(
    x: Any,
    attended: Any,
    output: Any,
    gate_up: Any,
    down: Any,
    behind: Any,
    y: Any,
    configs: Any,
    num_tasks: int,
) -> None:
    num_rows, hidden, inner = len(x), x.shape[1], num_steps(down) * BLOCK
    normed = aligned(padded(num_rows) * hidden * 2)
    gated = aligned(padded(num_rows) * inner * 2)
    num_columns, num_inner = hidden // BLOCK, inner // BLOCK
    num_sharing = num_tasks if num_rows > BLOCK else 1
    for task in prange(num_tasks):
        rows = plain_rows(attended.ctypes.data, attended.shape[1])
        sums = aligned(padded(num_rows) * SUM_BYTES)
        first, end = num_columns * task // num_tasks, num_columns * (task + 1) // num_tasks
        add_products(rows, num_rows, output, first, end, configs, sums, x, y)
        tile_release()
    for task in prange(num_sharing):
        first, end = share_of_rows(num_rows, task, num_sharing)
        norm_rows(y, first, end, behind, normed.ctypes.data + first * hidden * 2)
    for task in prange(num_tasks):
        normed_rows = tiled_rows(normed.ctypes.data, hidden)
        sums = aligned(2 * padded(num_rows) * SUM_BYTES)
        first, end = num_inner * task // num_tasks, num_inner * (task + 1) // num_tasks
        gate_products(
            normed_rows, num_rows, gate_up, behind.is_gelu, first, end, configs, sums, gated
        )
        tile_release()
    for task in prange(num_tasks):
        gated_rows = tiled_rows(gated.ctypes.data, inner)
        sums = aligned(padded(num_rows) * SUM_BYTES)
        first, end = num_columns * task // num_tasks, num_columns * (task + 1) // num_tasks
        add_products(gated_rows, num_rows, down, first, end, configs, sums, y, y)
        tile_release()


@compiled()
def share_of_rows(num_rows: int, task: int, num_tasks: int) -> Any:
    """[first, end): whole blocks, but for the last task's last one."""
    first = (num_rows * task // num_tasks + BLOCK // 2) // BLOCK * BLOCK
    end = (num_rows * (task + 1) // num_tasks + BLOCK // 2) // BLOCK * BLOCK
    return min(first, num_rows), num_rows if task == num_tasks - 1 else min(end, num_rows)
