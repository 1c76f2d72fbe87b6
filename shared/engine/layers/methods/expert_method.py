"""The seam between a layer's experts and the stored form of one of their weights; and whether all
are computed together, with the MLP that all tokens share.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.ops import (
    CpuCompressed,
    ExpertWeights,
    QuantizedWeight,
    SumLanes,
    Weight,
    grouped_linear,
    grouped_sums,
    is_cpu_compressed,
    pack_experts,
    packed_form,
)
from shared.engine.parallel.cuts import BLOCK


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
        """Returns the sums of subtrees of the lanes: FP32 [num_sums, S, N]."""
        ...


class DenseExperts:
    """A dense weight, plain or packed for the CPU's GEMMs, or in 11.4 bits for these."""

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


class QuantizedExperts:
    """A weight of four or eight bits, decoded just before it is multiplied. Where the compiled
    loops cannot do this, one expert at a time is dequantized.
    """

    def __init__(self, weight: QuantizedWeight, lanes: SumLanes) -> None:
        self._weight = weight
        self._lanes = lanes
        self.has_custom_gemm = packed_form(weight) is not None and weight.shape[1] == lanes.width

    def __call__(self, x: Tensor, rows: Tensor | None, offsets: Tensor) -> Tensor:
        if self.has_custom_gemm:
            return grouped_linear(x, rows, offsets, self._weight, lanes=self._lanes)
        parts = [
            grouped_linear(own, None, ends, dense, lanes=self._lanes)
            for own, ends, dense in self._by_expert(x, rows, offsets)
        ]
        return torch.cat(parts)

    def partials(
        self, x: Tensor, rows: Tensor | None, offsets: Tensor, num_sums: int = 1
    ) -> Tensor:
        if self.has_custom_gemm:
            operands = x, rows, offsets, self._weight
            return grouped_sums(*operands, lanes=self._lanes, num_sums=num_sums)
        parts = [
            grouped_sums(own, None, ends, dense, lanes=self._lanes, num_sums=num_sums)
            for own, ends, dense in self._by_expert(x, rows, offsets)
        ]
        return torch.cat(parts, dim=1)

    def _by_expert(
        self, x: Tensor, rows: Tensor | None, offsets: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Returns the rows of each expert that has some, their offsets, and its weight for
        GEMMs.
        """
        own = x if rows is None else x.index_select(0, rows)
        bounds = _bounds(offsets, len(own))
        num_strips = self._weight.shape[0] // BLOCK // (len(bounds) - 1)
        for expert, (first, end) in enumerate(pairwise(bounds)):
            if end > first:
                dense = self._weight.strips(expert * num_strips, (expert + 1) * num_strips)
                padded = torch.nn.functional.pad(dense, (0, x.shape[1] - dense.shape[1]))
                ends = offsets.new_tensor([0, end - first])
                yield own[first:end], ends, pack_experts(padded)


def _bounds(offsets: Tensor, num_rows: int) -> list[int]:
    """Returns the offsets of the experts' rows. Nothing is known on meta, where one expert has all
    rows: experts launch the same kernels.
    """
    if offsets.is_meta:
        return [0, *[num_rows] * (len(offsets) - 1)]
    bounds: list[int] = offsets.tolist()
    return bounds


def choose_expert_method(weight: Weight, lanes: SumLanes) -> ExpertMethod:
    """Raises ValueError for a form that has no GEMM for experts."""
    if isinstance(weight, QuantizedWeight):
        return QuantizedExperts(weight, lanes)
    if isinstance(weight, Tensor) or is_cpu_compressed(weight):
        return DenseExperts(weight, lanes)
    raise ValueError(f"experts have no product for weights as {type(weight).__name__}")


class ExpertsState(NamedTuple):
    """What the choice depends on. `weights` are those of experts and of the shared MLP."""

    is_batch_invariant: bool
    has_library: bool  # the device's fast products
    is_whole: bool  # no rank has another part of the layer
    has_bias: bool  # of the shared MLP
    has_clamped_gate: bool  # experts have biases
    scales_many_inputs: bool  # those of more than one expert of a token
    weights: tuple[object, ...]


def reason_against_fusing(state: ExpertsState) -> str:
    """Returns why each weight's own method must multiply; empty if they are computed together."""
    if state.is_batch_invariant:
        return "a row's bits must not depend on the other rows"
    if not state.has_library:
        return "the device has one kind of products"
    if not state.is_whole:
        return "ranks add their sums"
    if state.has_bias:
        return "the shared MLP has biases"
    if state.has_clamped_gate:
        return "experts have biases and a clamped gate"
    if state.scales_many_inputs:
        return "a token's input is another for each of its experts"
    if not all(isinstance(each, Tensor) and each.is_floating_point() for each in state.weights):
        return "weights are not dense"
    return ""


def expert_weights(weights: tuple[object, ...], *, is_gelu: bool) -> ExpertWeights:
    """Returns dense weights: gate and up, down, and those of the shared MLP, if there is one."""
    gate_up, down, *shared = (each for each in weights if isinstance(each, Tensor))
    shared_gate_up, shared_down = shared or (None, None)
    return ExpertWeights(gate_up, down, shared_gate_up, shared_down, is_gelu)
