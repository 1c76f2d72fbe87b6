"""Sorts the choices of tokens by expert, and adds the experts' results of each token."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.routing import ExpertRows


def sort_by_expert(ids: Tensor, num_experts: int, sums: Tensor | None = None) -> ExpertRows:
    """ids [T, k] -> the rows of all experts. Their offsets are added to `sums` [E + 1] int64."""
    order = ids.flatten().sort(stable=True)
    experts = torch.arange(num_experts + 1, device=ids.device)
    places = torch.empty_like(order.indices)
    places[order.indices] = torch.arange(ids.numel(), device=ids.device)
    offsets = torch.searchsorted(order.values, experts)
    if sums is not None:
        sums += offsets
    return ExpertRows(
        tokens=order.indices // ids.shape[1],
        offsets=offsets,
        places=places.view(ids.shape),
    )


def add_experts(
    y: Tensor, places: Tensor, weights: Tensor | None, shared: Tensor | None, width: int
) -> Tensor:
    """y [S, N], N >= width; places [T, k]; weights [T, k] FP32, None: all 1; shared [T, width].

    Σ_j weights[t, j] · y[places[t, j]] + shared[t] in FP32, in this order, rounded once to the
    dtype of y: [T, width].
    """
    total: Tensor | None = None
    for slot in range(places.shape[1]):
        rows = y[:, :width].index_select(0, places[:, slot]).float()
        rows = rows if weights is None else rows * weights[:, slot : slot + 1]
        total = rows if total is None else total + rows
    assert total is not None  # a token has at least one expert
    total = total if shared is None else total + shared.float()
    return total.to(y.dtype)
