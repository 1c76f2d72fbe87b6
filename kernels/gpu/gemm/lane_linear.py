"""y = x · weightᵀ + bias, summed over K in lanes; the formula is in `kernels/sum_lanes.py`.

The kernel of `kernels/gpu/gemm/linear.py`, whose segments are the lanes: a row's bits do not depend
on the other rows. A step of K never crosses a lane's border, so a rank that holds some of the lanes
computes them with the same steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.check_tensor import expect
from kernels.gpu.gemm.linear import launch
from kernels.gpu.gemm.linear_tile import Tiling, dense_tiling, expect_matmul, has_even_lanes
from kernels.sum_lanes import SumLanes, add_lanes

SPLIT_ROWS = 512  # whose sums of uneven lanes are in memory at a time


def lane_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, lanes: SumLanes
) -> Tensor:
    """Computes kernels.reference.lane_linear with Triton. Raises BadTensor."""
    tiled = _tiling(x, weight, bias, lanes)
    num_rows = x.shape[0]
    out = x.new_empty((num_rows, weight.shape[0]))
    if not out.numel():
        return out
    if num_rows <= SPLIT_ROWS or has_even_lanes(lanes, tiled.block_k):
        launch(x, weight, bias, tiled, out, is_batch_invariant=True, lanes=lanes)
        return out
    for low in range(0, num_rows, SPLIT_ROWS):
        rows, y = x[low : low + SPLIT_ROWS], out[low : low + SPLIT_ROWS]
        tiled = _tiling(rows, weight, bias, lanes)
        launch(rows, weight, bias, tiled, y, is_batch_invariant=True, lanes=lanes)
    return out


def lane_sums(x: Tensor, weight: Tensor, *, lanes: SumLanes, num_sums: int = 1) -> Tensor:
    """Computes kernels.reference.lane_sums with Triton. Raises BadTensor."""
    lanes.check(weight.shape[1], num_sums)
    tiled = _tiling(x, weight, None, lanes)._replace(is_split=True)
    sums = torch.empty((lanes.num, len(x), len(weight)), dtype=torch.float32, device=x.device)
    if sums.numel():
        launch(x, weight, None, tiled, sums, is_batch_invariant=True, lanes=lanes)
    return add_lanes(sums, num_sums)


def _tiling(x: Tensor, weight: Tensor, bias: Tensor | None, lanes: SumLanes) -> Tiling:
    expect_matmul(x, weight.shape, bias)
    num_rows, width = x.shape
    expect("weight", weight, (None, width), dtype=x.dtype, device=x.device)
    lanes.check(width, 1)
    shape = num_rows, weight.shape[0], width
    return dense_tiling(shape, x.dtype, is_batch_invariant=True, lanes=lanes)
