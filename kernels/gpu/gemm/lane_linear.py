"""y = x · weightᵀ + bias, summed over K in lanes; the formula is in `kernels/sum_lanes.py`.

The kernel of `kernels/gpu/gemm/linear.py`, whose segments are the lanes: a row's bits do not depend
on the other rows. A step of K never crosses a lane's border, so a rank that holds some of the lanes
computes them with the same steps.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kernels.check_tensor import expect
from kernels.gpu.gemm.linear import launch
from kernels.gpu.gemm.linear_tile import Tiling, expect_matmul, has_even_lanes, lane_tiling
from kernels.sum_lanes import SumLanes, add_lanes

SPLIT_ROWS = 512  # whose sums of uneven lanes are in memory at a time


def lane_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, lanes: SumLanes
) -> Tensor:
    """Computes kernels.reference.lane_linear with Triton. Raises BadTensor."""
    out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    is_even = has_even_lanes(lanes, _tiling(x, weight, bias, lanes).block_k)
    num_rows = len(x) if is_even else SPLIT_ROWS
    for low in range(0, len(x) if out.numel() else 0, num_rows):
        rows, y = x[low : low + num_rows], out[low : low + num_rows]
        tiled = _tiling(rows, weight, bias, lanes)
        launch(rows, weight, bias, tiled, y, is_batch_invariant=True, lanes=lanes)
    return out


def lane_sums(x: Tensor, weight: Tensor, *, lanes: SumLanes, num_sums: int = 1) -> Tensor:
    """Computes kernels.reference.lane_sums with Triton. Raises BadTensor."""
    lanes.check(weight.shape[1], num_sums)
    tiled = replace(_tiling(x, weight, None, lanes), is_split=True)
    sums = torch.empty((lanes.num, len(x), len(weight)), dtype=torch.float32, device=x.device)
    if sums.numel():
        launch(x, weight, None, tiled, sums, is_batch_invariant=True, lanes=lanes)
    return add_lanes(sums, num_sums)


def _tiling(x: Tensor, weight: Tensor, bias: Tensor | None, lanes: SumLanes) -> Tiling:
    expect_matmul(x, (len(weight), x.shape[-1]), bias)
    expect("weight", weight, (None, x.shape[-1]), dtype=x.dtype, device=x.device)
    lanes.check(weight.shape[1], 1)
    return lane_tiling((len(x), len(weight), x.shape[-1]), x.dtype, lanes)
