"""y = x · weightᵀ + bias with a split weight, whose tiles are decoded just before the dot product.

Tiles, steps, segments and the order of sums are those of `kernels/gpu/gemm/linear.py`, and a
decoded tile equals the dense one, with the same layout for the tensor cores: the result is
bit-identical to that of `linear`, also in its batch-invariant mode.

Memory-bound up to about 64 rows, like `linear`, with three quarters of its bytes. A weight takes
two and a half integer instructions; an H200 has time for five while 12 bits arrive.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import BadTensor
from kernels.gpu.gemm.linear_tile import (
    HALF_SHARED_BYTES,
    MAX_STAGES,
    Tiling,
    add_lane,
    expect_matmul,
    lane_tiling,
    lane_total,
    multiply,
    segment_steps,
    store_tile,
    tile_place,
    tiling,
)
from kernels.gpu.gemm.split_tile import (
    first_half,
    join_halves,
    second_half,
    upper_codes,
    weight_index,
)
from kernels.gpu.gemm.tile_dot import dot
from kernels.split_weight import HALF, SplitWeight
from kernels.sum_lanes import SumLanes

WEIGHT_BYTES = 2  # one weight of a stage, including the side table of wide groups
BLOCK_N = 64  # used beyond 16 rows: a decoded tile and the sums must fit into the registers


def compressed_linear(
    x: Tensor,
    weight: SplitWeight,
    bias: Tensor | None = None,
    *,
    is_batch_invariant: bool = False,
    lanes: SumLanes | None = None,
) -> Tensor:
    """Computes kernels.reference.compressed_linear with Triton, or kernels.reference.lane_linear if
    `lanes` are given, which must fit K. Raises BadTensor.
    """
    num_columns, width = weight.shape
    expect_matmul(x, weight.shape, bias)
    expect_split(weight, x)
    out = torch.empty((len(x), num_columns), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    is_batch_invariant = is_batch_invariant or lanes is not None
    tiled = _tiling((len(x), num_columns, width), lanes, is_batch_invariant=is_batch_invariant)
    operands = (x, *weight.planes().values())
    strides = x.stride(0), weight.exponents.shape[1], weight.is_wide.shape[1]
    multiply(
        *(_compressed_linear_kernel, tiled, operands, strides, bias, out),
        is_batch_invariant=is_batch_invariant,
        lanes=lanes,
        constants=(HALF,),
    )
    return out


def fits_lanes(lanes: SumLanes) -> bool:
    """Whether each step of a lane is one of whole groups; else the weight is decompressed first."""
    step = lane_tiling((1, 1, lanes.width), torch.bfloat16, lanes).block_k
    return lanes.alignment % step == 0


def _tiling(
    shape: tuple[int, int, int], lanes: SumLanes | None, *, is_batch_invariant: bool
) -> Tiling:
    """Returns the tiling of `linear` in everything that determines the order of sums.

    There are twice as many stages: half of them pass before the wide groups to load are known.
    """
    if lanes is None:
        tiled = tiling(shape, torch.bfloat16, is_batch_invariant=is_batch_invariant)
    else:
        tiled = lane_tiling(shape, torch.bfloat16, lanes)
    block_n = tiled.block_n if tiled.block_m <= 16 else BLOCK_N
    stage_bytes = (tiled.block_m * 2 + block_n * WEIGHT_BYTES) * tiled.block_k
    depth = max(2, min(MAX_STAGES, HALF_SHARED_BYTES // stage_bytes))
    return tiled._replace(block_n=block_n, num_stages=2 * depth)


def expect_split(weight: SplitWeight, x: Tensor) -> None:
    """Checks that x can be multiplied by the weight. Raises BadTensor."""
    if x.dtype != weight.dtype:
        raise BadTensor(f"x is {x.dtype}, not {weight.dtype}, the dtype of a split weight")
    if x.shape[-1] != weight.shape[1]:
        raise BadTensor(f"x has shape {list(x.shape)}, not [any, {weight.shape[1]}]")
    if x.device != weight.device:
        raise BadTensor(f"weight is on {weight.device}, not on {x.device}")


@triton.jit(do_not_specialize=["num_rows"])  # it changes from step to step
def _compressed_linear_kernel(
    x_ptr,
    sign_mantissa_ptr,
    exponents_ptr,
    base_ptr,
    is_wide_ptr,
    wide_start_ptr,
    wide_exponents_ptr,
    bias_ptr,
    out_ptr,
    stride_x_row,
    row_bytes,
    num_words,
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
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    first_row, first_column = tile_place(num_rows, num_columns, GROUP, BLOCK_M, BLOCK_N)
    row = first_row + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    step_k = tl.arange(0, BLOCK_K)
    BYTES: tl.constexpr = BLOCK_K // 2  # exponent bytes in a row of a step
    step_byte = tl.arange(0, BYTES)
    is_row = row[:, None] < num_rows  # [BLOCK_M, 1]
    x_row_ptr = x_ptr + row[:, None].to(tl.int64) * stride_x_row  # [BLOCK_M, 1]
    # columns beyond the last are computed from the first ones, and not stored
    weight_row = column % num_columns  # [BLOCK_N]
    rest_row_ptr = sign_mantissa_ptr + weight_row[:, None].to(tl.int64) * width  # [BLOCK_N, 1]
    lower_row_ptr = exponents_ptr + weight_row[:, None].to(tl.int64) * row_bytes
    base_bits = tl.load(base_ptr + weight_row[:, None]).to(tl.int16) << 7

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
        byte = (start // 2 + step_byte)[None, :]  # [1, BYTES]
        weight_k = weight_index(byte)
        if IS_EVEN_K:
            x = tl.load(x_row_ptr + k, mask=is_row, other=0.0)
            lower = tl.load(lower_row_ptr + byte)  # [BLOCK_N, BYTES]
            first_rest = tl.load(rest_row_ptr + weight_k)
            second_rest = tl.load(rest_row_ptr + weight_k + HALF)
        else:
            x = tl.load(x_row_ptr + k, mask=is_row & (k < limit), other=0.0)
            lower = tl.load(lower_row_ptr + byte, mask=byte < row_bytes, other=0)
            first_rest = tl.load(rest_row_ptr + weight_k, mask=weight_k < limit, other=0)
            second_rest = tl.load(
                rest_row_ptr + weight_k + HALF, mask=weight_k + HALF < limit, other=0
            )
        first_group = start // (2 * HALF)
        upper = upper_codes(
            is_wide_ptr,
            wide_start_ptr,
            wide_exponents_ptr,
            weight_row,
            first_group,
            num_words,
            BYTES,
        )
        weight = join_halves(
            first_half(first_rest, lower, upper, base_bits),
            second_half(second_rest, lower, upper, base_bits),
            BLOCK_N,
            BYTES,
        )  # [BLOCK_N, BLOCK_K]
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
