"""Operands of experts' products, at the shapes of two mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.gpu_kit.operands.columns import integers
from benchmarks.gpu_kit.session import Session
from tests.support.kernels.cases.sizes import MIXTRAL, QWEN3, Mixture

if TYPE_CHECKING:
    from kernels.sum_lanes import SumLanes

PRODUCTS = ("gate_up", "down")
MIXTURES = QWEN3, MIXTRAL
WEIGHT_SCALE = 0.02


def mixture_of(session: Session, name: str) -> Mixture:
    return session.inputs.sizes.mixtures[name]


@dataclass(frozen=True)
class Routed:
    """The rows of all experts, by expert, then by token. Choice j of token t is number t · k + j,
    and of expert (t · k + j) modulo E.
    """

    choices: Tensor  # [S] numbers
    tokens: Tensor  # [S]
    by_token: Tensor  # [S]: the rows in the order of their choices
    offsets: Tensor  # [E + 1]
    bounds: tuple[int, ...]  # the offsets on the host

    @property
    def num_used(self) -> int:
        """The experts with at least one row, whose weights are read."""
        return sum(first < end for first, end in pairwise(self.bounds))


def routed(session: Session, mixture: Mixture, tokens: Sequence[int]) -> Routed:
    num_experts, num_chosen = mixture.num_experts, mixture.num_chosen
    numbers = [token * num_chosen + choice for token in tokens for choice in range(num_chosen)]
    choices = sorted(numbers, key=lambda number: (number % num_experts, number))
    counts = [0] * num_experts
    for number in choices:
        counts[number % num_experts] += 1
    bounds = tuple(sum(counts[:expert]) for expert in range(num_experts + 1))
    return Routed(
        choices=integers(session, choices),
        tokens=integers(session, [number // num_chosen for number in choices]),
        by_token=integers(session, sorted(range(len(choices)), key=choices.__getitem__)),
        offsets=integers(session, bounds),
        bounds=bounds,
    )


@dataclass(frozen=True)
class Operands:
    """gate_up has one row of x for each token, down one for each choice."""

    x: Tensor
    weight: Tensor  # [E · N, K]
    lanes: SumLanes
    is_by_token: bool

    def launch(self, rows: Routed) -> Tensor:
        from kernels.gpu.gemm.grouped_linear import grouped_linear

        x = self.x if self.is_by_token else self.x[rows.choices]
        index = rows.tokens if self.is_by_token else None
        return grouped_linear(x, index, rows.offsets, self.weight, lanes=self.lanes)

    def wanted(self, rows: Routed) -> Tensor:
        """Returns one product of FP32 for each expert with rows."""
        own = self.x[rows.tokens if self.is_by_token else rows.choices]
        experts = self.weight.unflatten(0, (len(rows.bounds) - 1, -1))
        return torch.cat(
            [
                own[first:end].float() @ expert.float().T
                for expert, (first, end) in zip(experts, pairwise(rows.bounds), strict=True)
                if first < end
            ]
        )


def operands(session: Session, mixture: Mixture, product: str, num_tokens: int) -> Operands:
    from kernels.sum_lanes import SumLanes
    from shared.engine.parallel.cuts import column_lanes

    num_columns, width = mixture.weight_shape(product)
    is_by_token = product == "gate_up"
    num_rows = num_tokens if is_by_token else num_tokens * mixture.num_chosen
    shape = mixture.num_experts * num_columns, width
    return Operands(
        x=session.random(num_rows, width),
        weight=session.random(*shape, scale=WEIGHT_SCALE, seed=1),
        lanes=SumLanes.of((0, width) if is_by_token else column_lanes(width)),
        is_by_token=is_by_token,
    )
