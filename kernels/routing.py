"""Types that the operations of a mixture of experts exchange.

scores   s = softmax(logits) or sigmoid(logits), FP32
choice   the k best experts by logits, or by s + bias; with groups, those of the best groups by
         the sum of their two best; of equal experts, the one with the lowest id
weights  s of the chosen, without bias; renormalised: / (Σ + 1e-20); then · scale
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

NORM_EPS = 1e-20
NEVER = 1 << 62  # a number of rows that no step has


class ExpertRouting(Protocol):
    """A router's choice of experts by logits. `scale` is the factor of all weights."""

    @property
    def score(self) -> str: ...  # softmax or sigmoid

    @property
    def is_renormalised(self) -> bool: ...

    @property
    def num_groups(self) -> int: ...

    @property
    def top_groups(self) -> int: ...

    @property
    def scale(self) -> float: ...


class ExpertChoice(NamedTuple):
    """The experts of each token, by rising id: the order in which their rows are added."""

    ids: Tensor  # [T, k] int64
    weights: Tensor  # [T, k] FP32; NaN if a logit of the token is NaN or infinite


class ExpertRows(NamedTuple):
    """A row for each token and expert that it chose: S = T · k rows by expert, then by token.

    The rows of expert e are offsets[e] to offsets[e + 1].
    """

    tokens: Tensor  # [S] int64: a row's token
    offsets: Tensor  # [E + 1] int64
    places: Tensor  # [T, k] int64: the row of each choice


class ExpertWeights(NamedTuple):
    """The weights of a layer's experts, and of the MLP that all tokens share, if it has one."""

    gate_up: Tensor  # [E · 2 · inner, K]: of each expert the gate, then up
    down: Tensor  # [E · N, inner]
    shared_gate_up: Tensor | None
    shared_down: Tensor | None  # [M, any]
    is_gelu: bool  # else SiLU gates


def chooses_by_logits(routing: ExpertRouting, bias: Tensor | None) -> bool:
    """Whether scores would give the same order, but for their rounding."""
    return bias is None and routing.num_groups == 1
