"""A GEMM summed over K in lanes; the formula is in `kernels/sum_lanes.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.sum_lanes import SumLanes, add_lanes


def lane_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, lanes: SumLanes
) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N] in the dtype of x. The sum is rounded, then the
    bias is added. A row's bits do not depend on the other rows.
    """
    y = lane_sums(x, weight, lanes=lanes)[0].to(x.dtype)
    return y if bias is None else y.add_(bias)


def lane_sums(x: Tensor, weight: Tensor, *, lanes: SumLanes, num_sums: int = 1) -> Tensor:
    """Returns the sums of `num_sums` subtrees of the lanes: FP32 [num_sums, M, N]."""
    lanes.check(weight.shape[1], num_sums)
    sums = x.new_zeros((lanes.num, len(x), len(weight)), dtype=torch.float32)
    for lane, (first, end) in enumerate(lanes.ranges):
        part = weight[:, first:end].float()
        for row in range(len(x)):
            sums[lane, row] = part @ x[row, first:end].float()
    return add_lanes(sums, num_sums)
