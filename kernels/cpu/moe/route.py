"""Chooses the experts of each token; the formula is in `kernels/routing.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from kernels.cpu.compile import compiled
from kernels.cpu.simd.intrinsics import FEW_ROWS, LOG2_E, exp2
from kernels.cpu.simd.tasks import num_tasks
from kernels.routing import NORM_EPS, ExpertChoice, ExpertRouting, chooses_by_logits

_f32 = np.float32
_NONE = _f32(-np.inf)
_LEAST_EXPONENT, _MOST_EXPONENT = _f32(-126.0), _f32(126.0)


def route(
    logits: Tensor, bias: Tensor | None, num_chosen: int, routing: ExpertRouting
) -> ExpertChoice:
    """Computes kernels.torch_ops.route."""
    num_tokens = len(logits)
    ids = torch.empty((num_tokens, num_chosen), dtype=torch.int64)
    weights = torch.empty((num_tokens, num_chosen), dtype=torch.float32)
    tasks = 1 if num_tokens <= FEW_ROWS else num_tasks(num_tokens)
    _route(
        logits.contiguous().numpy(),
        np.zeros(0, _f32) if bias is None else bias.numpy(),
        routing.score == "softmax",
        chooses_by_logits(routing, bias),
        routing.num_groups,
        routing.top_groups,
        routing.is_renormalised,
        _f32(routing.scale),
        ids.numpy(),
        weights.numpy(),
        tasks,
    )
    return ExpertChoice(ids, weights)


@compiled(parallel=True)
def _route(
    logits: Any,
    bias: Any,
    is_softmax: bool,
    by_logits: bool,
    num_groups: int,
    top_groups: int,
    is_renormalised: bool,
    scale: Any,
    ids: Any,
    weights: Any,
    num_tasks: int,
) -> None:
    num_experts = logits.shape[1]
    for task in prange(num_tasks):
        scores, values = np.empty(num_experts, _f32), np.empty(num_experts, _f32)
        first, end = len(logits) * task // num_tasks, len(logits) * (task + 1) // num_tasks
        for row in range(first, end):
            is_nan = score_experts(logits[row], is_softmax, scores)
            for expert in range(num_experts):
                value = logits[row, expert] if by_logits else scores[expert]
                if len(bias):
                    value += bias[expert]
                values[expert] = _NONE if np.isnan(logits[row, expert]) else value
            if num_groups > 1:
                exclude_groups(values, num_groups, top_groups)
            choose(values, ids[row])
            weigh(scores, ids[row], is_renormalised, scale, is_nan, weights[row])


@compiled()
def score_experts(logits: Any, is_softmax: bool, scores: Any) -> bool:
    """Fills `scores`; whether a logit is NaN or infinite."""
    largest, is_nan = _NONE, False
    for expert in range(len(logits)):
        largest = max(largest, logits[expert])
        is_nan = is_nan or not logits[expert] < _f32(np.inf)
    if not is_softmax:
        for expert in range(len(logits)):
            scores[expert] = _f32(1.0) / (_f32(1.0) + power(-logits[expert]))
        return is_nan
    total = _f32(0.0)
    for expert in range(len(logits)):
        scores[expert] = power(logits[expert] - largest)
        total += scores[expert]
    for expert in range(len(logits)):
        scores[expert] /= total
    return is_nan


@compiled(is_inlined=True)
def power(x: Any) -> Any:
    """e**x, within the range of normal numbers."""
    return exp2(min(max(x * _f32(LOG2_E), _LEAST_EXPONENT), _MOST_EXPONENT))


@compiled()
def exclude_groups(values: Any, num_groups: int, top_groups: int) -> None:
    """Sets the values of all groups but the best to -inf."""
    size = len(values) // num_groups
    sums, chosen = np.empty(num_groups, _f32), np.empty(top_groups, np.int64)
    for group in range(num_groups):
        best, second = _NONE, _NONE
        for expert in range(group * size, (group + 1) * size):
            if values[expert] > best:
                best, second = values[expert], best
            elif values[expert] > second:
                second = values[expert]
        sums[group] = best if size == 1 else best + second
    choose(sums, chosen)
    index = 0
    for group in range(num_groups):
        if index < top_groups and chosen[index] == group:
            index += 1
            continue
        for expert in range(group * size, (group + 1) * size):
            values[expert] = _NONE


@compiled()
def choose(values: Any, chosen: Any) -> None:
    """Fills `chosen` with the indices of the largest values, in rising order; of equal values the
    first are chosen.
    """
    for count in range(len(chosen)):
        best = -1
        for index in range(len(values)):
            is_better = best < 0 or values[index] > values[best]
            if is_better and not is_among(index, chosen, count):
                best = index
        place = count
        while place > 0 and chosen[place - 1] > best:
            chosen[place] = chosen[place - 1]
            place -= 1
        chosen[place] = best


@compiled(is_inlined=True)
def is_among(index: int, chosen: Any, count: int) -> bool:
    found = False
    for other in range(count):
        found = found or chosen[other] == index
    return found


@compiled()
def weigh(
    scores: Any, ids: Any, is_renormalised: bool, scale: Any, is_nan: bool, weights: Any
) -> None:
    total = _f32(0.0)
    for slot in range(len(ids)):
        weights[slot] = scores[ids[slot]]
        total += weights[slot]
    divisor = total + _f32(NORM_EPS) if is_renormalised else _f32(1.0)
    for slot in range(len(ids)):
        weights[slot] = _f32(np.nan) if is_nan else weights[slot] / divisor * scale
