"""Chooses the experts of each token; the formula is in `kernels/routing.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.routing import NORM_EPS, ExpertChoice, ExpertRouting, chooses_by_logits


def route(
    logits: Tensor, bias: Tensor | None, num_chosen: int, routing: ExpertRouting
) -> ExpertChoice:
    """logits [T, E] FP32, bias [E] FP32 -> `num_chosen` experts of each token."""
    is_softmax = routing.score == "softmax"
    scores = logits.softmax(dim=-1) if is_softmax else logits.sigmoid()
    values = logits if chooses_by_logits(routing, bias) else scores
    values = values if bias is None else values + bias
    values = values.masked_fill(logits.isnan() | values.isnan(), -torch.inf)
    if routing.num_groups > 1:
        values = _of_best_groups(values, routing)
    ids = _best(values, num_chosen).sort(dim=-1).values
    weights = scores.gather(1, ids)
    if routing.is_renormalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + NORM_EPS)
    is_nan = ~(logits < torch.inf).all(dim=-1, keepdim=True)
    return ExpertChoice(ids, (weights * routing.scale).masked_fill(is_nan, torch.nan))


def _best(values: Tensor, count: int) -> Tensor:
    """Returns the indices of the largest values [T, n] -> [T, count]; of equal ones the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _of_best_groups(values: Tensor, routing: ExpertRouting) -> Tensor:
    """values [T, E], -inf outside the best groups."""
    groups = values.unflatten(1, (routing.num_groups, -1))
    sums = groups.topk(min(2, groups.shape[2]), dim=-1).values.sum(dim=-1)
    is_best = torch.zeros_like(sums, dtype=torch.bool)
    is_best.scatter_(1, _best(sums, routing.top_groups), True)
    return groups.masked_fill(~is_best.unsqueeze(2), -torch.inf).flatten(1)
