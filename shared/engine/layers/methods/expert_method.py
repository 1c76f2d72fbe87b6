"""The seam between a layer's experts and the stored form of one of their weights."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kernels.ops import (
    CpuCompressed,
    SumLanes,
    Weight,
    grouped_linear,
    grouped_sums,
    is_cpu_compressed,
    packed_form,
)


class ExpertMethod(Protocol):
    """Computes with one weight of all experts, [E · N, K], in one form. `rows` [S] index x, None:
    all of it; those of expert e are offsets[e] to offsets[e + 1], `offsets` [E + 1].

    A row's bits depend neither on the other rows nor on how many its expert has; all lossless
    forms give the same.
    """

    @property
    def has_custom_gemm(self) -> bool:
        """Whether a kernel of this project multiplies, not torch's library."""
        ...

    def __call__(self, x: Tensor, rows: Tensor | None, offsets: Tensor) -> Tensor:
        """x [T, K] -> [S, N], summed in lanes, rounded once to the dtype of x."""
        ...

    def partials(
        self, x: Tensor, rows: Tensor | None, offsets: Tensor, num_sums: int = 1
    ) -> Tensor:
        """The sums of subtrees of the lanes: FP32 [num_sums, S, N]."""
        ...


class DenseExperts:
    """A dense weight, plain or packed for the CPU's products, or in 11.4 bits for these."""

    def __init__(self, weight: Tensor | CpuCompressed, lanes: SumLanes) -> None:
        self._weight = weight
        self._lanes = lanes
        self.has_custom_gemm = packed_form(weight) is not None

    def __call__(self, x: Tensor, rows: Tensor | None, offsets: Tensor) -> Tensor:
        return grouped_linear(x, rows, offsets, self._weight, lanes=self._lanes)

    def partials(
        self, x: Tensor, rows: Tensor | None, offsets: Tensor, num_sums: int = 1
    ) -> Tensor:
        return grouped_sums(x, rows, offsets, self._weight, lanes=self._lanes, num_sums=num_sums)


def choose_expert_method(weight: Weight, lanes: SumLanes) -> ExpertMethod:
    """Raises ValueError for a form that has no product for experts."""
    if isinstance(weight, Tensor) or is_cpu_compressed(weight):
        return DenseExperts(weight, lanes)
    raise ValueError(f"experts have no product for weights as {type(weight).__name__}")
