"""The row-wise operations of a decoder layer between its products: norms, gates, rotary positions.

Each is bit-identical to the full-tensor operation that its docstring names. Rows are addressed by
number; `pre_attention` and `layer` are a layer's `PreAttention` or `PostAttention`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.compile import compiled
from kernels.cpu.gemm.gemm_common import (
    BLOCK,
    SUM_BYTES,
    num_blocks,
    open_block,
    padded,
    row_at,
    sum_lanes,
    sum_products,
)
from kernels.cpu.gemm.lane_linear import multiply_lanes
from kernels.cpu.layer.gated import GELU_CUBIC, GELU_FACTOR
from kernels.cpu.simd.dtype_convert import load_numbers, rounded_as, store_numbers
from kernels.cpu.simd.f32x32 import (
    NUM_FLOATS,
    exp2_floats,
    fma_floats,
    load_floats,
    same,
    smaller,
    total,
)
from kernels.cpu.simd.intrinsics import LANES, LOG2_E

_f32 = np.float32


@compiled()
def norm_rows(x: Any, low: int, high: int, layer: Any, rows: Any, first: int) -> None:
    """Writes `rms_norm` of rows [low, high) to `rows` from `first` on."""
    hidden, x_at = x.shape[1], x.ctypes.data
    weight_at = layer.norm.ctypes.data
    for row in range(high - low):
        source_at = x_at + (low + row) * hidden * x.itemsize
        norm_row(source_at, hidden, weight_at, layer, row_at(rows, first + row), rows.step_bytes, x)


@compiled(is_inlined=True)
def norm_row(
    x_at: int, num_columns: int, weight_at: int, layer: Any, y_at: int, step_bytes: int, like: Any
) -> None:
    """Computes `rms_norm` of one row, whose dtype is that of `like`; the result's blocks of 32 have
    a stride of `step_bytes`.
    """
    dtype, size = like.dtype, like.itemsize
    scale = inverse_size(x_at, num_columns, layer.eps, dtype, size)
    for column in range(0, num_columns, NUM_FLOATS):
        count = num_columns - column
        scaled = load_numbers(x_at + column * size, dtype, count) * scale
        weight = load_numbers(weight_at + column * size, dtype, count)
        if layer.has_unit_offset:
            normed = scaled * (weight + _f32(1.0))
        else:
            normed = rounded_as(scaled, dtype) * weight
        store_numbers(normed, y_at + column // NUM_FLOATS * step_bytes, dtype, count)


@compiled()
def inverse_size(x_at: int, num_columns: int, eps: Any, dtype: Any, size: int) -> Any:
    """1 / sqrt(mean(x²) + eps), summed in LANES chains."""
    first, second = same(_f32(0.0)), same(_f32(0.0))
    for column in range(0, num_columns, LANES):
        count, at = num_columns - column, x_at + column * size
        x = load_numbers(at, dtype, count)
        first = fma_floats(x, x, first)
        x = load_numbers(at + NUM_FLOATS * size, dtype, count - NUM_FLOATS)
        second = fma_floats(x, x, second)
    return _f32(1.0) / np.sqrt(total(first + second) / _f32(num_columns) + eps)


@compiled()
def add_products(
    rows: Any,
    num_rows: int,
    weight: Any,
    borders: Any,
    first: int,
    end: int,
    sums: Any,
    x: Any,
    y: Any,
) -> None:
    """y [T, N] = x + rows · weightᵀ, summed in lanes, the product rounded first; y may be x."""
    row_bytes, block_bytes, sums_at = y.strides[0], BLOCK * y.itemsize, sums.ctypes.data
    num_lanes = len(borders) - 1
    for block in range(first, end):
        opened = open_block(weight, block)
        sum_lanes(rows, num_rows, weight, block, opened, borders, 0, num_lanes, 0, sums_at)
        x_at, y_at = x.ctypes.data + block * block_bytes, y.ctypes.data + block * block_bytes
        for row in range(num_rows):
            update = rounded_as(load_floats(sums_at + row * SUM_BYTES), y.dtype)
            old = load_numbers(x_at + row * row_bytes, y.dtype, BLOCK)
            store_numbers(old + update, y_at + row * row_bytes, y.dtype, BLOCK)


@compiled()
def add_or_keep(
    rows: Any,
    num_rows: int,
    weight: Any,
    borders: Any,
    first: int,
    end: int,
    sums: Any,
    added: Any,
    x: Any,
    y: Any,
) -> None:
    """Runs `add_products`; if the product is normalised first, it is stored in `added`
    [1, T, N].
    """
    if added.size:
        multiply_lanes(rows, num_rows, weight, borders, first, end, sums, added, y.dtype)
    else:
        add_products(rows, num_rows, weight, borders, first, end, sums, x, y)


@compiled()
def add_normed(added: Any, low: int, high: int, norm: Any, layer: Any, x: Any, y: Any) -> None:
    """y = x + `rms_norm` of `added`, for rows [low, high); does nothing if `added` is empty."""
    if not added.size:
        return
    hidden, row_bytes, step_bytes = x.shape[1], x.strides[0], BLOCK * x.itemsize
    for row in range(low, high):
        added_at = added.ctypes.data + row * row_bytes
        norm_row(added_at, hidden, norm.ctypes.data, layer, added_at, step_bytes, x)
        for at in range(row * row_bytes, (row + 1) * row_bytes, step_bytes):
            update = load_numbers(added.ctypes.data + at, x.dtype, BLOCK)
            old = load_numbers(x.ctypes.data + at, x.dtype, BLOCK)
            store_numbers(old + update, y.ctypes.data + at, x.dtype, BLOCK)


@compiled()
def gate_products(
    rows: Any,
    num_rows: int,
    weight: Any,
    is_gelu: bool,
    first: int,
    end: int,
    sums: Any,
    gated: Any,
    dtype: Any,
) -> None:
    """Writes the gated product to rows `gated` of `dtype`, for blocks [first, end)."""
    num_gates = num_blocks(weight) // 2
    gate_at = sums.ctypes.data
    up_at = gate_at + padded(num_rows) * SUM_BYTES
    for block in range(first, end):
        sum_products(rows, num_rows, weight, block, gate_at)
        sum_products(rows, num_rows, weight, num_gates + block, up_at)
        for row in range(num_rows):
            gate = rounded_as(load_floats(gate_at + row * SUM_BYTES), dtype)
            up = rounded_as(load_floats(up_at + row * SUM_BYTES), dtype)
            y_at = row_at(gated, row) + block * gated.step_bytes
            store_numbers(gated_floats(gate, up, is_gelu), y_at, dtype, BLOCK)


@compiled(is_inlined=True)
def gated_floats(gate: Any, up: Any, is_gelu: bool) -> Any:
    """Returns `gated` in FP32."""
    if is_gelu:
        exponent = (gate * gate * GELU_CUBIC + _f32(1.0)) * gate * GELU_FACTOR
    else:
        exponent = gate * _f32(-LOG2_E)
    decay = exp2_floats(smaller(exponent, same(_f32(128.0))))
    return gate / (decay + _f32(1.0)) * up


@compiled()
def place_heads(
    heads: Any,
    low: int,
    first: int,
    end: int,
    pre_attention: Any,
    cos: Any,
    sin: Any,
    slots: Any,
    query: Any,
    key: Any,
    value: Any,
) -> None:
    """Runs `rotate_and_store` on heads [first, end); head 0 belongs to token `low`."""
    num_heads, num_kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[2]
    half, block_size, head_bytes = cos.shape[1], key.shape[2], head_dim * query.itemsize
    num_rotated = num_heads + num_kv_heads
    query_norm_at, key_norm_at = (
        pre_attention.query_norm.ctypes.data,
        pre_attention.key_norm.ctypes.data,
    )
    step_bytes = BLOCK * query.itemsize
    for row in range(first, end):
        token = low + row
        heads_at = heads.ctypes.data + row * heads.shape[1] * head_bytes
        angles = cos.ctypes.data + token * half * 4, sin.ctypes.data + token * half * 4
        add_bias(heads_at, pre_attention.bias)
        query_at = query.ctypes.data + token * num_heads * head_bytes
        if len(pre_attention.query_norm):
            for head in range(num_rotated):
                at = heads_at + head * head_bytes
                weight_at = query_norm_at if head < num_heads else key_norm_at
                norm_row(at, head_dim, weight_at, pre_attention, at, step_bytes, query)
        for head in range(num_heads):
            at = head * head_bytes
            rotate(heads_at + at, angles, half, query_at + at, query)
        if slots[token] < 0:
            continue
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(num_kv_heads):
            at = ((block * num_kv_heads + head) * block_size + offset) * head_bytes
            key_at = heads_at + (num_heads + head) * head_bytes
            rotate(key_at, angles, half, key.ctypes.data + at, query)
            value_at = heads_at + (num_rotated + head) * head_bytes
            copy(value_at, head_dim, value.ctypes.data + at, query)


@compiled(is_inlined=True)
def rotate(x_at: int, angles: Any, half: int, y_at: int, like: Any) -> None:
    """Rotates one head, with the size and dtype of `like`; `angles`: addresses of cos and sin."""
    cos_at, sin_at = angles
    dtype, size = like.dtype, like.itemsize
    for index in range(0, half, NUM_FLOATS):
        at, upper, count = index * size, (half + index) * size, half - index
        cos = load_numbers(cos_at + index * 4, _f32, count)
        sin = load_numbers(sin_at + index * 4, _f32, count)
        a, b = load_numbers(x_at + at, dtype, count), load_numbers(x_at + upper, dtype, count)
        store_numbers(a * cos - b * sin, y_at + at, dtype, count)
        store_numbers(b * cos + a * sin, y_at + upper, dtype, count)
    rotated = 2 * half * size
    copy(x_at + rotated, like.shape[2] - 2 * half, y_at + rotated, like)


@compiled(is_inlined=True)
def copy(x_at: int, num: int, y_at: int, like: Any) -> None:
    for index in range(0, num, NUM_FLOATS):
        at, count = index * like.itemsize, num - index
        store_numbers(load_numbers(x_at + at, like.dtype, count), y_at + at, like.dtype, count)


@compiled(is_inlined=True)
def add_bias(row_at: int, bias: Any) -> None:
    for column in range(0, len(bias), NUM_FLOATS):
        offset, count = column * bias.itemsize, len(bias) - column
        added = load_numbers(bias.ctypes.data + offset, bias.dtype, count)
        old = load_numbers(row_at + offset, bias.dtype, count)
        store_numbers(old + added, row_at + offset, bias.dtype, count)
