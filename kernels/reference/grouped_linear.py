"""GEMMs of rows with the weights of experts, summed over K in lanes; whole MLPs, without lanes."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kernels.reference.gated import gelu_and_mul, silu_and_mul
from kernels.reference.lane_linear import lane_sums
from kernels.routing import NEVER, ExpertRows, ExpertWeights
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


def expert_mlp(
    x: Tensor,
    rows: ExpertRows,
    weights: ExpertWeights,
    *,
    factors: Tensor | None = None,
    library_rows: int = NEVER,
) -> tuple[Tensor, Tensor | None]:
    """x [T, K] -> a row for each of `rows` [S, N], and of the shared MLP one a token, [T, M].

    With e the expert of row s and t its token:

    g[s] = activation(f[t] · x[t] · gate[e]ᵀ) · (f[t] · x[t] · up[e]ᵀ)   f: `factors` [T], else 1
    y[s] = g[s] · down[e]ᵀ

    Sums are FP32; g and y are rounded once to the dtype of x. The shared MLP has no factors.
    On CUDA torch's grouped GEMM multiplies from `library_rows` rows on, if there are no factors.
    """
    bounds = rows.offsets.tolist()
    num_experts = len(bounds) - 1
    own = x.index_select(0, rows.tokens)
    scales = None if factors is None else factors.index_select(0, rows.tokens)
    gates = weights.gate_up.unflatten(0, (num_experts, -1))
    downs = weights.down.unflatten(0, (num_experts, -1))
    parts = []
    for expert, (first, end) in enumerate(pairwise(bounds)):
        scale = None if scales is None else scales[first:end]
        gated = _gated(own[first:end], gates[expert], scale, is_gelu=weights.is_gelu)
        parts.append(_product(gated, downs[expert]).to(x.dtype))
    shared = None
    if weights.shared_gate_up is not None and weights.shared_down is not None:
        width = weights.shared_gate_up.shape[1]
        gated = _gated(x[:, :width], weights.shared_gate_up, None, is_gelu=weights.is_gelu)
        shared = _product(gated, weights.shared_down).to(x.dtype)
    return torch.cat(parts), shared


def _gated(x: Tensor, weight: Tensor, scale: Tensor | None, *, is_gelu: bool) -> Tensor:
    gate_up = _product(x, weight)
    if scale is not None:
        gate_up = gate_up * scale[:, None]
    return (gelu_and_mul if is_gelu else silu_and_mul)(gate_up).to(x.dtype)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return x.float() @ weight.float().T
