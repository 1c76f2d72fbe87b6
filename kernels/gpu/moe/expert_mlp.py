"""The MLPs of a layer's experts in two launches, with the MLP that all tokens share: the formula is
in kernels/reference.

A launch multiplies the rows of all experts, sorted and cut into tiles as in
`kernels/gpu/gemm/grouped_linear.py`, and those of the shared MLP behind them. The first launch also
computes the gates. Tiles follow from the number of rows, and sums are not in lanes: a row's bits
depend on the other rows, so the exact mode has `grouped_linear`. Of many rows the library's
grouped GEMM may be the faster one: see library_experts.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import FLOATS, INDICES, expect
from kernels.gpu.gemm.grouped_linear import expert_of
from kernels.gpu.gemm.tile_dot import dot
from kernels.gpu.moe.library_experts import by_library
from kernels.gpu.rows.gated import gated_product
from kernels.integers import cdiv, next_power_of_2
from kernels.routing import NEVER, ExpertRows, ExpertWeights

NO_GATE, SILU, GELU = range(3)
MOST_ROWS = 128  # of a tile


class Tile(NamedTuple):
    """`block_n` counts rows of the weight: with gates, half of them are columns of the result."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# Of few rows a long step of K, so that loads under way hide the memory's latency.
TILES = {
    16: Tile(16, 64, 128, 4, 4),
    32: Tile(32, 128, 64, 4, 4),
    64: Tile(64, 128, 64, 4, 4),
    128: Tile(128, 128, 64, 8, 3),
}
FP32_TILE = Tile(16, 64, 32, 4, 3)  # no tensor cores: a thread's factors must fit its registers


class Operands(NamedTuple):
    """Rows and weights of one launch. `rows` index x, None: all; `shared` ones follow experts'."""

    x: Tensor
    rows: Tensor | None
    offsets: Tensor
    weight: Tensor
    shared_x: Tensor | None
    shared_weight: Tensor | None
    factors: Tensor | None


def expert_mlp(
    x: Tensor,
    rows: ExpertRows,
    weights: ExpertWeights,
    *,
    factors: Tensor | None = None,
    library_rows: int = NEVER,
) -> tuple[Tensor, Tensor | None]:
    """Computes kernels.reference.grouped_linear on the device. Raises BadTensor."""
    if len(rows.tokens) < library_rows or factors is not None:
        return by_triton(x, rows, weights, factors=factors)
    return by_library(x, rows, weights)


def by_triton(
    x: Tensor, rows: ExpertRows, weights: ExpertWeights, *, factors: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Raises BadTensor."""
    gate = GELU if weights.is_gelu else SILU
    shared_x = None if weights.shared_gate_up is None else x
    first = Operands(
        *(x, rows.tokens, rows.offsets, weights.gate_up),
        *(shared_x, weights.shared_gate_up, factors),
    )
    gated, shared = _launch(first, gate)
    last = Operands(gated, None, rows.offsets, weights.down, shared, weights.shared_down, None)
    return _launch(last, NO_GATE)


def tile_of(num_rows: int, num_experts: int, dtype: torch.dtype) -> Tile:
    """Tiles have room for twice the mean of an expert's rows, which most experts then have."""
    if dtype == torch.float32:
        return FP32_TILE
    mean = cdiv(num_rows, min(num_rows, num_experts))
    return TILES[min(max(next_power_of_2(2 * mean) if mean > 8 else 16, 16), MOST_ROWS)]


def _launch(given: Operands, gate: int) -> tuple[Tensor, Tensor | None]:
    x, offsets, weight = given.x, given.offsets, given.weight
    num_experts, num_rows = len(offsets) - 1, len(x if given.rows is None else given.rows)
    parts = 2 if gate else 1  # of the weight's rows for a column of the result
    num_columns = len(weight) // num_experts // parts
    _expect(given, num_columns * parts * num_experts)
    out = x.new_empty(num_rows, num_columns)
    shared_out = _shared_out(given, parts)
    tile = tile_of(num_rows, num_experts, x.dtype)
    block_n = tile.block_n // parts
    most_tiles = min(num_rows, num_experts) + num_rows // tile.block_m
    num_routed = most_tiles * cdiv(num_columns, block_n)
    num_tokens, shared_columns = (0, 0) if shared_out is None else shared_out.shape
    num_shared = cdiv(num_tokens, tile.block_m) * cdiv(shared_columns, block_n)
    if not num_routed + num_shared:
        return out, shared_out
    shared_x, shared_weight = given.shared_x, given.shared_weight
    _expert_kernel[(num_routed + num_shared,)](
        *(x, given.rows, offsets, weight, given.factors, out),
        *(shared_x, shared_weight, shared_out),
        *(x.stride(0), weight.stride(0), num_columns, weight.shape[1], num_experts),
        *(0 if shared_x is None else shared_x.stride(0), num_tokens, shared_columns),
        *(0, 0) if shared_weight is None else (shared_weight.stride(0), shared_weight.shape[1]),
        *(most_tiles, num_routed),
        GATE=gate,
        BLOCK_EXPERTS=next_power_of_2(num_experts),
        BLOCK_M=tile.block_m,
        BLOCK_N=block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )
    return out, shared_out


def _expect(given: Operands, num_weight_rows: int) -> None:
    x, device = given.x, given.x.device
    expect("x", x, (None, None), dtype=FLOATS)
    expect("offsets", given.offsets, (None,), dtype=INDICES, device=device)
    shape = num_weight_rows, x.shape[1]
    expect("weight", given.weight, shape, dtype=x.dtype, device=device)
    if given.rows is not None:
        expect("rows", given.rows, (None,), dtype=INDICES, device=device)
    if given.factors is not None:
        expect("factors", given.factors, (len(x),), dtype=torch.float32, device=device)


def _shared_out(given: Operands, parts: int) -> Tensor | None:
    """Returns memory for the rows of the shared MLP; None if there is none. Raises BadTensor."""
    x, weight = given.shared_x, given.shared_weight
    if x is None or weight is None:
        return None
    expect("shared_x", x, (None, None), dtype=given.x.dtype)
    expect("shared_weight", weight, (None, None), dtype=x.dtype, device=x.device)
    if weight.shape[1] > x.shape[1]:
        expect("shared_weight", weight, (None, x.shape[1]))
    return x.new_empty(len(x), len(weight) // parts)


@triton.jit(
    do_not_specialize=["num_tokens", "most_tiles", "num_routed"]  # they change from step to step
)
def _expert_kernel(
    x_ptr,
    rows_ptr,
    offsets_ptr,
    weight_ptr,
    factors_ptr,
    out_ptr,
    shared_x_ptr,
    shared_weight_ptr,
    shared_out_ptr,
    stride_x_row,
    stride_weight_row,
    num_columns,
    width,
    num_experts,
    stride_shared_x_row,
    num_tokens,
    shared_columns,
    stride_shared_weight_row,
    shared_width,
    most_tiles,
    num_routed,
    GATE: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    program = tl.program_id(0)
    if program < num_routed:
        tile, first_column = program % most_tiles, program // most_tiles * BLOCK_N
        expert, first_tile = expert_of(tile, offsets_ptr, num_experts, BLOCK_EXPERTS, BLOCK_M)
        if expert < num_experts:
            first_row = tl.load(offsets_ptr + expert) + (tile - first_tile) * BLOCK_M
            end_row = tl.load(offsets_ptr + expert + 1)
            first_weight = expert.to(tl.int64) * num_columns * (1 if GATE == 0 else 2)
            own_weight_ptr = weight_ptr + first_weight * stride_weight_row
            _tile(
                x_ptr,
                rows_ptr,
                own_weight_ptr,
                factors_ptr,
                out_ptr,
                stride_x_row,
                stride_weight_row,
                num_columns,
                width,
                first_row,
                end_row,
                first_column,
                GATE,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
    elif shared_out_ptr is not None:
        row_tiles = tl.cdiv(num_tokens, BLOCK_M)
        first_row = (program - num_routed) % row_tiles * BLOCK_M
        first_column = (program - num_routed) // row_tiles * BLOCK_N
        _tile(
            shared_x_ptr,
            None,
            shared_weight_ptr,
            None,
            shared_out_ptr,
            stride_shared_x_row,
            stride_shared_weight_row,
            shared_columns,
            shared_width,
            first_row,
            num_tokens,
            first_column,
            GATE,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )


@triton.jit
def _tile(
    x_ptr,
    rows_ptr,
    weight_ptr,
    factors_ptr,
    out_ptr,
    stride_x_row,
    stride_weight_row,
    num_columns,
    width,
    first_row,
    end_row,
    first_column,
    GATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = first_row + tl.arange(0, BLOCK_M)
    is_row = row < end_row
    x_row = row
    if rows_ptr is not None:
        x_row = tl.load(rows_ptr + row, mask=is_row, other=0)
    x_row_ptr = x_ptr + x_row[:, None].to(tl.int64) * stride_x_row  # [BLOCK_M, 1]
    column = first_column + tl.arange(0, BLOCK_N)
    # columns beyond the last are computed from the first ones, and not stored
    weight_row = (column % num_columns)[:, None].to(tl.int64)
    weight_row_ptr = weight_ptr + weight_row * stride_weight_row  # [BLOCK_N, 1]
    up_row_ptr = weight_ptr + (weight_row + num_columns) * stride_weight_row
    step_k = tl.arange(0, BLOCK_K)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, width, BLOCK_K):
        k = start + step_k
        x = tl.load(x_row_ptr + k, mask=is_row[:, None] & (k < width), other=0.0)
        weight = tl.load(weight_row_ptr + k, mask=k < width, other=0.0)
        acc = dot(x, tl.trans(weight), acc)
        if GATE != 0:
            weight = tl.load(up_row_ptr + k, mask=k < width, other=0.0)
            up = dot(x, tl.trans(weight), up)
    if factors_ptr is not None:
        factor = tl.load(factors_ptr + x_row, mask=is_row, other=0.0)[:, None]
        acc, up = acc * factor, up * factor
    if GATE != 0:
        acc = gated_product(acc, up, GATE == 2)
    place = row[:, None].to(tl.int64) * num_columns + column[None, :]
    is_inside = is_row[:, None] & (column[None, :] < num_columns)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=is_inside)
