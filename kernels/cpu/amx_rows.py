"""What a decoder layer does to rows of BF16 between its products: norms, gates, rotary positions.

Each has the bits of the operation over whole tensors that its docstring names; `layer` is a part of
`amx_layer`, rows are addressed by number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.amx_products import (
    BLOCK,
    ROW_BYTES,
    STEP_BYTES,
    SUM_BYTES,
    num_blocks,
    padded,
    sum_products,
)
from kernels.cpu.compiled import compiled
from kernels.cpu.floats import (
    NUM_FLOATS,
    exp2_floats,
    fma_floats,
    load_floats,
    load_halves,
    rounded,
    same,
    smaller,
    store_halves,
    total,
)
from kernels.cpu.gated import GELU_CUBIC, GELU_FACTOR
from kernels.cpu.lanes import LANES, LOG2_E

_f32 = np.float32


@compiled()
def norm_rows(x: Any, low: int, high: int, layer: Any, tiled_at: int) -> None:
    """`rms_norm` of rows [low, high), to tiled rows."""
    hidden = x.shape[1]
    for row in range(high - low):
        x_at = x.ctypes.data + (low + row) * hidden * 2
        y_at = tiled_at + row // BLOCK * hidden * ROW_BYTES + row % BLOCK * ROW_BYTES
        norm_row(x_at, hidden, layer.norm.ctypes.data, layer, y_at, STEP_BYTES)


@compiled(is_inlined=True)
def norm_row(
    x_at: int, num_columns: int, weight_at: int, layer: Any, y_at: int, step_bytes: int
) -> None:
    """`rms_norm` of one row; the result's pieces of 32 lie `step_bytes` apart."""
    scale = inverse_size(x_at, num_columns, layer.eps)
    for step in range(num_columns // BLOCK):
        scaled = load_halves(x_at + step * ROW_BYTES) * scale
        weight = load_halves(weight_at + step * ROW_BYTES)
        if layer.has_unit_offset:
            normed = scaled * (weight + _f32(1.0))
        else:
            normed = rounded(scaled) * weight
        store_halves(normed, y_at + step * step_bytes)


@compiled()
def inverse_size(x_at: int, num_columns: int, eps: Any) -> Any:
    """1 / sqrt(mean(x²) + eps), in LANES chains."""
    first, second = same(_f32(0.0)), same(_f32(0.0))
    whole = num_columns // LANES * LANES
    for column in range(0, whole, LANES):
        x = load_halves(x_at + column * 2)
        first = fma_floats(x, x, first)
        x = load_halves(x_at + (column + NUM_FLOATS) * 2)
        second = fma_floats(x, x, second)
    if whole < num_columns:
        x = load_halves(x_at + whole * 2)
        first = fma_floats(x, x, first)
    return _f32(1.0) / np.sqrt(total(first + second) / _f32(num_columns) + eps)


@compiled()
def add_products(
    rows: Any,
    num_rows: int,
    weight: Any,
    first: int,
    end: int,
    configs: Any,
    sums: Any,
    x: Any,
    y: Any,
) -> None:
    """y [T, N] = x + rows · weightᵀ, the product rounded first; y may be x."""
    row_bytes, sums_at = y.strides[0], sums.ctypes.data
    for block in range(first, end):
        sum_products(rows, num_rows, weight, block, configs, sums_at)
        x_at, y_at = x.ctypes.data + block * ROW_BYTES, y.ctypes.data + block * ROW_BYTES
        for row in range(num_rows):
            update = rounded(load_floats(sums_at + row * SUM_BYTES))
            store_halves(load_halves(x_at + row * row_bytes) + update, y_at + row * row_bytes)


@compiled()
def gate_products(
    rows: Any,
    num_rows: int,
    weight: Any,
    is_gelu: bool,
    first: int,
    end: int,
    configs: Any,
    sums: Any,
    gated: Any,
) -> None:
    """The gated product as tiled rows [T / 32, inner / 32, 32, 32], blocks [first, end)."""
    num_gates = num_blocks(weight) // 2
    gate_at = sums.ctypes.data
    up_at = gate_at + padded(num_rows) * SUM_BYTES
    for block in range(first, end):
        sum_products(rows, num_rows, weight, block, configs, gate_at)
        sum_products(rows, num_rows, weight, num_gates + block, configs, up_at)
        y_at = gated.ctypes.data + block * STEP_BYTES
        for row in range(num_rows):
            gate = rounded(load_floats(gate_at + row * SUM_BYTES))
            up = rounded(load_floats(up_at + row * SUM_BYTES))
            at = row // BLOCK * num_gates * STEP_BYTES + row % BLOCK * ROW_BYTES
            store_halves(gated_floats(gate, up, is_gelu), y_at + at)


@compiled(is_inlined=True)
def gated_floats(gate: Any, up: Any, is_gelu: bool) -> Any:
    """As `gated`."""
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
    before: Any,
    cos: Any,
    sin: Any,
    slots: Any,
    query: Any,
    key: Any,
    value: Any,
) -> None:
    """`rotate_and_store` of heads [first, end), of which the first of all is token `low`."""
    num_heads, num_kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[2]
    half, block_size, head_bytes = cos.shape[1], key.shape[2], head_dim * 2
    num_rotated = num_heads + num_kv_heads
    for row in range(first, end):
        token = low + row
        row_at = heads.ctypes.data + row * heads.shape[1] * head_bytes
        cos_at, sin_at = cos.ctypes.data + token * half * 4, sin.ctypes.data + token * half * 4
        add_bias(row_at, before.bias)
        query_at = query.ctypes.data + token * num_heads * head_bytes
        if len(before.query_norm):
            for head in range(num_heads):
                at = row_at + head * head_bytes
                norm_row(at, head_dim, before.query_norm.ctypes.data, before, at, ROW_BYTES)
            for head in range(num_heads, num_rotated):
                at = row_at + head * head_bytes
                norm_row(at, head_dim, before.key_norm.ctypes.data, before, at, ROW_BYTES)
        for head in range(num_heads):
            at = head * head_bytes
            rotate(row_at + at, head_dim, cos_at, sin_at, half, query_at + at)
        if slots[token] < 0:
            continue
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(num_kv_heads):
            at = ((block * num_kv_heads + head) * block_size + offset) * head_bytes
            key_at = row_at + (num_heads + head) * head_bytes
            rotate(key_at, head_dim, cos_at, sin_at, half, key.ctypes.data + at)
            copy(row_at + (num_rotated + head) * head_bytes, head_dim, value.ctypes.data + at)


@compiled(is_inlined=True)
def rotate(x_at: int, head_dim: int, cos_at: int, sin_at: int, half: int, y_at: int) -> None:
    for index in range(0, half, NUM_FLOATS):
        at, upper = index * 2, (half + index) * 2
        cos, sin = load_floats(cos_at + index * 4), load_floats(sin_at + index * 4)
        a, b = load_halves(x_at + at), load_halves(x_at + upper)
        store_halves(a * cos - b * sin, y_at + at)
        store_halves(b * cos + a * sin, y_at + upper)
    copy(x_at + half * 4, head_dim - 2 * half, y_at + half * 4)


@compiled(is_inlined=True)
def copy(x_at: int, num: int, y_at: int) -> None:
    for index in range(0, num, NUM_FLOATS):
        store_halves(load_halves(x_at + index * 2), y_at + index * 2)


@compiled(is_inlined=True)
def add_bias(row_at: int, bias: Any) -> None:
    for column in range(0, len(bias), NUM_FLOATS):
        at = row_at + column * 2
        store_halves(load_halves(at) + load_halves(bias.ctypes.data + column * 2), at)
