"""GEMMs of rows with the weights of experts, summed over K in lanes: the formula is in
kernels/reference.

Rows are sorted by expert and cut into tiles of `BLOCK_M` rows of one expert. The number of programs
is that of the most tiles that so many rows can have, so it does not depend on the choice and a
captured step can launch it. A program finds its tile by the offsets; those of no expert return at
once. The shapes of tiles and the steps of K follow from the weight alone, and a step never crosses
a lane's border: a row's bits depend neither on the other rows nor on the rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import FLOATS, INDICES, expect
from kernels.gpu.gemm.linear_tile import INVARIANT_ROWS, add_lane, borders_on, lane_total
from kernels.gpu.gemm.tile_dot import dot
from kernels.integers import cdiv, next_power_of_2
from kernels.sum_lanes import SumLanes

# Steps of K: what a tensor-core product needs, and the longest whose tiles stay in the registers.
LEAST_STEP, MOST_STEP = 16, 64


def grouped_linear(
    x: Tensor, rows: Tensor | None, offsets: Tensor, weight: Tensor, *, lanes: SumLanes
) -> Tensor:
    """Computes kernels.reference.grouped_linear with Triton. Raises BadTensor."""
    y = x.new_empty(1, *_result_shape(x, rows, offsets, weight, lanes, 1))
    _launch(x, rows, offsets, weight, lanes, y)
    return y[0]


def grouped_sums(
    x: Tensor,
    rows: Tensor | None,
    offsets: Tensor,
    weight: Tensor,
    *,
    lanes: SumLanes,
    num_sums: int = 1,
) -> Tensor:
    """Computes kernels.reference.grouped_sums with Triton. Raises BadTensor."""
    shape = _result_shape(x, rows, offsets, weight, lanes, num_sums)
    sums = torch.empty((num_sums, *shape), dtype=torch.float32, device=x.device)
    _launch(x, rows, offsets, weight, lanes, sums)
    return sums


def _result_shape(
    x: Tensor,
    rows: Tensor | None,
    offsets: Tensor,
    weight: Tensor,
    lanes: SumLanes,
    num_sums: int,
) -> tuple[int, int]:
    expect("x", x, (None, None), dtype=FLOATS)
    expect("weight", weight, (None, x.shape[1]), dtype=x.dtype, device=x.device)
    expect("offsets", offsets, (None,), dtype=INDICES, device=x.device)
    if rows is not None:
        expect("rows", rows, (None,), dtype=INDICES, device=x.device)
    lanes.check(x.shape[1], num_sums)
    return len(x if rows is None else rows), len(weight) // (len(offsets) - 1)


def _launch(
    x: Tensor, rows: Tensor | None, offsets: Tensor, weight: Tensor, lanes: SumLanes, out: Tensor
) -> None:
    num_sums, num_rows, num_columns = out.shape
    if not out.numel():
        return
    num_experts = len(offsets) - 1
    block_m, block_n, block_k = _tile(x.dtype, lanes)
    most_tiles = min(num_rows, num_experts) + num_rows // block_m
    _grouped_kernel[(most_tiles, cdiv(num_columns, block_n), num_sums)](
        *(x, rows, offsets, weight, out, borders_on(lanes, x.device)),
        *(x.stride(0), weight.stride(0), num_rows, num_columns, num_experts),
        HAS_ROWS=rows is not None,
        NUM_LANES=lanes.num // num_sums,
        IS_ALIGNED=lanes.alignment % LEAST_STEP == 0,
        BLOCK_EXPERTS=next_power_of_2(num_experts),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        enable_fp_fusion=True,
    )


def _tile(dtype: torch.dtype, lanes: SumLanes) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_N, BLOCK_K: by the weight's dtype and lanes, which all ranks share."""
    least = lanes.alignment & -lanes.alignment
    block_k = min(max(least, LEAST_STEP), MOST_STEP)
    if dtype == torch.float32:
        return 16, 32, block_k
    return INVARIANT_ROWS, 64 if block_k == MOST_STEP else 32, block_k


@triton.jit(do_not_specialize=["num_rows"])
def _grouped_kernel(
    x_ptr,
    rows_ptr,
    offsets_ptr,
    weight_ptr,
    out_ptr,
    borders_ptr,
    stride_x_row,
    stride_weight_row,
    num_rows,
    num_columns,
    num_experts,
    HAS_ROWS: tl.constexpr,
    NUM_LANES: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(2)
    expert, first_tile = expert_of(tile, offsets_ptr, num_experts, BLOCK_EXPERTS, BLOCK_M)
    if expert >= num_experts:
        return
    first_row = tl.load(offsets_ptr + expert) + (tile - first_tile) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    is_row = row < tl.load(offsets_ptr + expert + 1)
    x_row = row
    if HAS_ROWS:
        x_row = tl.load(rows_ptr + row, mask=is_row, other=0)
    x_row_ptr = x_ptr + x_row[:, None].to(tl.int64) * stride_x_row  # [BLOCK_M, 1]
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # columns beyond the last are computed from the first ones, and not stored
    weight_row = expert.to(tl.int64) * num_columns + (column % num_columns)[:, None]
    weight_row_ptr = weight_ptr + weight_row * stride_weight_row  # [BLOCK_N, 1]
    step_k = tl.arange(0, BLOCK_K)[None, :]

    pair = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    quad, half = pair, pair
    for lane in range(NUM_LANES):
        low = tl.load(borders_ptr + part * NUM_LANES + lane)
        high = tl.load(borders_ptr + part * NUM_LANES + lane + 1)
        if IS_ALIGNED:  # otherwise loads would not be wide, nor asynchronous
            low, high = tl.multiple_of(low, 16), tl.multiple_of(high, 16)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(low, high, BLOCK_K):
            k = start + step_k
            x = tl.load(x_row_ptr + k, mask=is_row[:, None] & (k < high), other=0.0)
            weight = tl.load(weight_row_ptr + k, mask=k < high, other=0.0)
            acc = dot(x, tl.trans(weight), acc)
        pair, quad, half = add_lane(acc, lane, pair, quad, half, NUM_LANES)
    acc = lane_total(pair, quad, half, NUM_LANES)
    place = (part.to(tl.int64) * num_rows + row[:, None]) * num_columns + column[None, :]
    is_inside = is_row[:, None] & (column[None, :] < num_columns)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def expert_of(tile, offsets_ptr, num_experts, BLOCK_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile, `num_experts` if there is none, and the expert's first tile."""
    expert = tl.arange(0, BLOCK_EXPERTS)
    first = tl.load(offsets_ptr + expert, mask=expert < num_experts, other=0)
    end = tl.load(offsets_ptr + expert + 1, mask=expert < num_experts, other=0)
    ends = tl.cumsum(tl.cdiv((end - first).to(tl.int32), BLOCK_M))
    is_before = (ends <= tile) & (expert < num_experts)
    return tl.sum(is_before.to(tl.int32)), tl.max(tl.where(is_before, ends, 0))
