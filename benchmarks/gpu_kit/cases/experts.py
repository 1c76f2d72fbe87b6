"""Products of experts, at the shapes of two mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.gpu_kit.cases.case import FP32, Build, Case, integers
from benchmarks.gpu_kit.session import Session
from benchmarks.gpu_kit.shapes import EIGHT_B

if TYPE_CHECKING:
    from kernels.sum_lanes import SumLanes

PRODUCTS = ("gate_up", "down")
WEIGHT_SCALE = 0.02


@dataclass(frozen=True)
class Mixture:
    num_experts: int
    num_chosen: int  # by a token
    hidden: int
    inner: int

    def weight_shape(self, product: str) -> tuple[int, int]:
        """[N, K] of one expert's fused gate and up, or of its down."""
        wide = (2 * self.inner, self.hidden)
        return wide if product == "gate_up" else (self.hidden, self.inner)


MIXTURES = {
    "Qwen3-30B-A3B": Mixture(128, 8, 2048, 768),
    "Mixtral-8x7B": Mixture(8, 2, 4096, 14_336),
}
SMALL = Mixture(4, 2, 64, 256)  # beside a small model


def mixture_of(session: Session, name: str) -> Mixture:
    return MIXTURES[name] if session.shapes is EIGHT_B else SMALL


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
        """One product of FP32 for each expert with rows."""
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


def grouped_linear(name: str, product: str, num_tokens: int, session: Session) -> Case:
    mixture = mixture_of(session, name)
    rows = routed(session, mixture, range(num_tokens))
    own = operands(session, mixture, product, num_tokens)
    return Case(("grouped_linear",), lambda: own.launch(rows), lambda: own.wanted(rows))


def route(name: str, num_tokens: int, session: Session) -> Case:
    """The weights of the chosen experts, renormalised as in both mixtures."""
    from kernels.gpu.moe.route import route as launch
    from kernels.torch_ops.route import route as torch_route
    from shared.engine.model_config.moe_config import Routing

    mixture, routing = mixture_of(session, name), Routing(score="softmax", is_renormalised=True)
    logits = session.random(num_tokens, mixture.num_experts, dtype=FP32)
    given = logits, None, mixture.num_chosen, routing
    return Case(("route",), lambda: launch(*given).weights, lambda: torch_route(*given).weights)


def sort_by_expert(name: str, num_tokens: int, session: Session) -> Case:
    """The place of each choice."""
    from kernels.gpu.moe.expert_rows import sort_by_expert as launch
    from kernels.torch_ops.expert_rows import sort_by_expert as torch_sort

    mixture = mixture_of(session, name)
    ids = choices_of(session, mixture, num_tokens)
    return Case(
        ("expert_rows",),
        lambda: launch(ids, mixture.num_experts).places.float(),
        lambda: torch_sort(ids, mixture.num_experts).places.float(),
        tolerance=0.0,
    )


def add_experts(name: str, num_tokens: int, session: Session) -> Case:
    from kernels.gpu.moe.expert_rows import add_experts as launch
    from kernels.torch_ops.expert_rows import add_experts as torch_add

    mixture = mixture_of(session, name)
    y = session.random(num_tokens * mixture.num_chosen, mixture.hidden)
    places = integers(session, range(len(y))).view(num_tokens, mixture.num_chosen)
    weights = session.random(*places.shape, dtype=FP32, seed=1)
    given = y, places, weights, None, mixture.hidden
    return Case(("expert_rows",), lambda: launch(*given), lambda: torch_add(y.float(), *given[1:]))


def choices_of(session: Session, mixture: Mixture, num_tokens: int) -> Tensor:
    """[T, k]: choice j of token t is expert (t · k + j) modulo E, as in `routed`."""
    numbers = [number % mixture.num_experts for number in range(num_tokens * mixture.num_chosen)]
    return integers(session, numbers).view(num_tokens, mixture.num_chosen)


CASES: dict[str, Build] = {
    **{
        f"{build.__name__} {name}, 64 tokens": partial(build, name, 64)
        for build in (route, sort_by_expert, add_experts)
        for name in MIXTURES
    },
    **{
        f"grouped_linear {name} {product}, 64 tokens": partial(grouped_linear, name, product, 64)
        for name in MIXTURES
        for product in PRODUCTS
    },
}
