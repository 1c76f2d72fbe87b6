"""y = x · weightᵀ + bias for few rows: a dense tiled GEMM, the baseline of compressed weights.

    product[m, n] = Σ_s Σ_{k in segment s} x[m, k] · weight[n, k],   y = round(product) + bias

Both sums run in FP32. The inner one is a chain of tensor-core products over rising k; K is cut into
`NUM_SEGMENTS` segments if the tiles of y alone would leave multiprocessors idle: each segment's
sum is written out and a second kernel adds them in order, without atomics.

Batch-invariant: K is always cut into the same segments, computed by one or several programs, whose
sums are added in the same order; and a tile has at least `INVARIANT_ROWS` rows, from which on
Hopper uses its warp-group instruction, so that each element is the same chain of the same
instruction. The number of other rows and columns in its tile does not affect that chain.

Memory-bound up to about 64 rows: the weight is read once, and reading it determines the time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import expect
from kernels.gpu.gemm.linear_tile import (
    Tiling,
    add_lane,
    dense_tiling,
    expect_matmul,
    lane_total,
    multiply,
    segment_steps,
    store_tile,
    tile_place,
)
from kernels.gpu.gemm.tile_dot import dot
from kernels.sum_lanes import SumLanes


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, is_batch_invariant: bool = False
) -> Tensor:
    """Computes kernels.reference.linear with Triton. Raises BadTensor."""
    expect_matmul(x, weight.shape, bias)
    num_rows, width = x.shape
    expect("weight", weight, (None, width), dtype=x.dtype, device=x.device)
    num_columns = weight.shape[0]
    out = x.new_empty((num_rows, num_columns))
    if not out.numel():
        return out
    shape = num_rows, num_columns, width
    tiled = dense_tiling(shape, x.dtype, is_batch_invariant=is_batch_invariant)
    launch(x, weight, bias, tiled, out, is_batch_invariant=is_batch_invariant)
    return out


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tiled: Tiling,
    out: Tensor,
    *,
    is_batch_invariant: bool,
    lanes: SumLanes | None = None,
) -> None:
    """Fills `out`, see `multiply`, with checked operands."""
    strides = x.stride(0), weight.stride(0)
    multiply(
        *(_linear_kernel, tiled, (x, weight), strides, bias, out),
        is_batch_invariant=is_batch_invariant,
        lanes=lanes,
    )


@triton.jit(do_not_specialize=["num_rows"])  # it changes from step to step
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    stride_x_row,
    stride_weight_row,
    num_rows,
    num_columns,
    width,
    borders_ptr,
    HAS_BIAS: tl.constexpr,
    IS_CUT: tl.constexpr,
    PARTS: tl.constexpr,
    IS_LANED: tl.constexpr,
    IS_UNEVEN: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    IS_EVEN_K: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    first_row, first_column = tile_place(num_rows, num_columns, GROUP, BLOCK_M, BLOCK_N)
    row = first_row + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    step_k = tl.arange(0, BLOCK_K)
    is_row = row[:, None] < num_rows  # [BLOCK_M, 1]
    x_row_ptr = x_ptr + row[:, None].to(tl.int64) * stride_x_row  # [BLOCK_M, 1]
    # columns beyond the last are computed from the first ones, and not stored
    weight_row = (column % num_columns)[:, None].to(tl.int64)  # [BLOCK_N, 1]
    weight_row_ptr = weight_ptr + weight_row * stride_weight_row

    LANES: tl.constexpr = NUM_SEGMENTS // PARTS  # of this program
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    pair, quad, half = total, total, total
    first, last, steps, base, limit = segment_steps(
        width, borders_ptr, PARTS, IS_UNEVEN, IS_ALIGNED, NUM_SEGMENTS, BLOCK_K
    )
    end = first + steps  # end of the segment
    for step in range(first, last):
        start = base + step * BLOCK_K
        k = (start + step_k)[None, :]  # [1, BLOCK_K]
        if IS_EVEN_K:
            x = tl.load(x_row_ptr + k, mask=is_row, other=0.0)
            weight = tl.load(weight_row_ptr + k)
        else:
            x = tl.load(x_row_ptr + k, mask=is_row & (k < limit), other=0.0)
            weight = tl.load(weight_row_ptr + k, mask=k < limit, other=0.0)
        acc = dot(x, tl.trans(weight), acc)  # [BLOCK_M, BLOCK_N]
        if IS_CUT:  # noqa: SIM102  one is decided at compile time, one at run time
            if step + 1 == end:
                if IS_LANED:
                    lane = (step - first) // steps
                    pair, quad, half = add_lane(acc, lane, pair, quad, half, LANES)
                else:
                    total += acc
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                end += steps
    if IS_CUT:
        acc = lane_total(pair, quad, half, LANES) if IS_LANED else total + acc
    store_tile(acc, bias_ptr, out_ptr, row, column, num_rows, num_columns, HAS_BIAS, PARTS)
