"""y[t, h] = x[t, h] · weight[h]ᵀ: the GEMMs of all heads in one launch.

A head is one more axis of the grid. Tiles, steps and segments of K are those of the batch-invariant
`kernels/gpu/gemm/linear.py`, whose bits a head's rows have.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import FLOATS, expect
from kernels.gpu.gemm.linear_tile import (
    GROUP_ROWS,
    MAX_REGISTERS,
    NUM_SEGMENTS,
    tile_place,
    tiling,
)
from kernels.gpu.gemm.tile_dot import dot
from kernels.integers import cdiv


def per_head_linear(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Computes kernels.reference.per_head_linear with Triton. Raises BadTensor."""
    expect("x", x, (None, None, None), dtype=FLOATS)
    num_rows, num_heads, width = x.shape
    expect("weight", weight, (num_heads, None, width), dtype=x.dtype, device=x.device)
    num_columns = weight.shape[1]
    if out is None:
        out = x.new_empty(num_rows, num_heads, num_columns)
    expect("out", out, (num_rows, num_heads, num_columns), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    shape = num_rows, num_heads * num_columns, width
    tiled = tiling(shape, x.dtype, is_batch_invariant=True)
    row_tiles = cdiv(num_rows, tiled.block_m)
    _per_head_kernel[(row_tiles * cdiv(num_columns, tiled.block_n), num_heads)](
        *(x, weight, out, *x.stride()[:2], *weight.stride()[:2], *out.stride()[:2]),
        *(num_rows, num_columns, width),
        IS_EVEN_K=width % tiled.block_k == 0,
        NUM_SEGMENTS=NUM_SEGMENTS,
        GROUP=GROUP_ROWS,
        BLOCK_M=tiled.block_m,
        BLOCK_N=tiled.block_n,
        BLOCK_K=tiled.block_k,
        num_warps=tiled.num_warps,
        num_stages=tiled.num_stages,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=True,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])  # it changes from step to step
def _per_head_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    stride_x_row,
    stride_x_head,
    stride_weight_head,
    stride_weight_row,
    stride_out_row,
    stride_out_head,
    num_rows,
    num_columns,
    width,
    IS_EVEN_K: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    first_row, first_column = tile_place(num_rows, num_columns, GROUP, BLOCK_M, BLOCK_N)
    head = tl.program_id(1).to(tl.int64)
    row = first_row + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    step_k = tl.arange(0, BLOCK_K)
    is_row = row[:, None] < num_rows  # [BLOCK_M, 1]
    x_head_ptr = x_ptr + head * stride_x_head
    x_row_ptr = x_head_ptr + row[:, None].to(tl.int64) * stride_x_row  # [BLOCK_M, 1]
    # columns beyond the last are computed from the first ones, and not stored
    weight_row = (column % num_columns)[:, None].to(tl.int64)  # [BLOCK_N, 1]
    weight_row_ptr = weight_ptr + head * stride_weight_head + weight_row * stride_weight_row

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    num_steps = tl.cdiv(width, BLOCK_K)
    steps = tl.cdiv(num_steps, NUM_SEGMENTS)
    end = steps  # end of the segment
    for step in range(num_steps):
        k = (step * BLOCK_K + step_k)[None, :]  # [1, BLOCK_K]
        if IS_EVEN_K:
            x = tl.load(x_row_ptr + k, mask=is_row, other=0.0)
            weight = tl.load(weight_row_ptr + k)
        else:
            x = tl.load(x_row_ptr + k, mask=is_row & (k < width), other=0.0)
            weight = tl.load(weight_row_ptr + k, mask=k < width, other=0.0)
        acc = dot(x, tl.trans(weight), acc)  # [BLOCK_M, BLOCK_N]
        if step + 1 == end:
            total += acc
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            end += steps
    total += acc
    is_inside = is_row & (column[None, :] < num_columns)
    out_row_ptr = out_ptr + head * stride_out_head + row[:, None].to(tl.int64) * stride_out_row
    tl.store(out_row_ptr + column[None, :], total.to(out_ptr.dtype.element_ty), mask=is_inside)
