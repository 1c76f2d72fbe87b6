"""Pipeline stages: contiguous layers whose slowest stage is as fast as possible. Pure.

The embedding belongs to the first stage and the vocabulary's GEMM to the last. In Kimi K2 the
latter costs as much as 2.4 layers: equal numbers of layers would make the last stage slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class ModelCosts:
    """Time or work of each part in one unit, measured or computed. Raises ValueError."""

    layers: tuple[float, ...]
    embedding: float = 0.0
    lm_head: float = 0.0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a model without layers has no stages")
        if not all(0 <= cost < float("inf") for cost in (*self.layers, *self.ends)):
            raise ValueError("a cost is negative or not finite")

    @property
    def ends(self) -> tuple[float, float]:
        return self.embedding, self.lm_head


def cut_stages(costs: ModelCosts, num_stages: int) -> tuple[int, ...]:
    """Returns the first layer of each stage, and the number of layers. Each stage has a
    layer at least.

    The least cost of the slowest stage, and among such cuts the least sum of squared costs; equal
    ones differ by nothing that is computed, and the one with the earliest borders is returned.
    Dynamic programming over (stages, layers): O(stages * layers^2). Raises ValueError.
    """
    num_layers = len(costs.layers)
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers cannot form {num_stages} stages")
    sums = _prefix_sums(costs)
    # best[end]: (slowest, sum of squares, borders) of the layers [0, end) in this many stages
    best = {end: _joined((0.0, 0.0, (0,)), sums, end) for end in range(1, num_layers + 1)}
    for stage in range(2, num_stages + 1):
        best = {
            end: min(_joined(best[begin], sums, end) for begin in range(stage - 1, end))
            for end in range(stage, num_layers + 1)
        }
    return best[num_layers][2]


_Cut = tuple[float, float, tuple[int, ...]]


def _prefix_sums(costs: ModelCosts) -> list[float]:
    """sums[i]: cost of the layers before i; the ends are part of the outermost layers."""
    layers = list(costs.layers)
    layers[0] += costs.embedding
    layers[-1] += costs.lm_head
    return list(accumulate(layers, initial=0.0))


def _joined(cut: _Cut, sums: Sequence[float], end: int) -> _Cut:
    slowest, squares, borders = cut
    cost = sums[end] - sums[borders[-1]]
    return max(slowest, cost), squares + cost * cost, (*borders, end)


def stage_costs(costs: ModelCosts, borders: Sequence[int]) -> list[float]:
    sums = _prefix_sums(costs)
    return [sums[end] - sums[begin] for begin, end in pairwise(borders)]


def imbalance(costs: ModelCosts, borders: Sequence[int]) -> float:
    """Returns the cost of the slowest stage over the mean: 1.0 is perfect."""
    found = stage_costs(costs, borders)
    mean = sum(found) / len(found)
    return max(found) / mean if mean > 0 else 1.0
