"""GEMMs of rows with the weights of experts, summed over K in lanes."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.lane_linear import lane_sums
from kernels.sum_lanes import SumLanes


def grouped_linear(
    x: Tensor, rows: Tensor | None, offsets: Tensor, weight: Tensor, *, lanes: SumLanes
) -> Tensor:
    """x [T, K], rows [S] of x, None: all; offsets [E + 1] into these; weight [E · N, K] -> [S, N].

    y[s] = x[rows[s]] · weight[e]ᵀ for offsets[e] <= s < offsets[e + 1], rounded once to the dtype
    of x. A row's bits depend neither on the other rows nor on how many its expert has.
    """
    return grouped_sums(x, rows, offsets, weight, lanes=lanes)[0].to(x.dtype)


def grouped_sums(
    x: Tensor,
    rows: Tensor | None,
    offsets: Tensor,
    weight: Tensor,
    *,
    lanes: SumLanes,
    num_sums: int = 1,
) -> Tensor:
    """Returns the sums of `num_sums` subtrees of the lanes: FP32 [num_sums, S, N]."""
    own = x if rows is None else x.index_select(0, rows)
    bounds = offsets.tolist()
    experts = weight.unflatten(0, (len(bounds) - 1, -1))
    parts = [
        lane_sums(own[first:end], expert, lanes=lanes, num_sums=num_sums)
        for expert, first, end in zip(experts, bounds, bounds[1:], strict=False)
    ]
    return torch.cat(parts, dim=1)
