"""A dense weight, plain or packed for the CPU's GEMMs."""

from __future__ import annotations

from torch import Tensor

from kernels.ops import (
    LaneWeight,
    SumLanes,
    argmax,
    lane_linear,
    lane_sums,
    linear,
    packed_argmax,
    packed_form,
    packed_logits,
    wide_linear,
)


class DenseMethod:
    """Multiplies with `weight` [N, K], or the result of `pack_weight`. A weight that is not packed
    may be filled later.

    With `lanes` the GEMM sums in them, and `weight` may be the result of `pack_lanes`.
    """

    def __init__(
        self, weight: LaneWeight, *, is_batch_invariant: bool, lanes: SumLanes | None = None
    ) -> None:
        self.weight = weight
        self._is_batch_invariant = is_batch_invariant
        self._lanes = lanes
        self._packed = packed_form(weight)

    @property
    def has_custom_gemm(self) -> bool:
        return self._packed is not None

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        is_invariant, lanes = self._is_batch_invariant, self._lanes
        if lanes is None:
            return linear(x, self._dense(), bias, is_batch_invariant=is_invariant)
        return lane_linear(x, self.weight, bias, lanes=lanes, is_batch_invariant=is_invariant)

    def partials(self, x: Tensor, num_sums: int = 1) -> Tensor:
        if self._lanes is None:
            raise ValueError("this GEMM does not sum in lanes")
        return lane_sums(x, self.weight, lanes=self._lanes, num_sums=num_sums)

    def logits(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return packed_logits(x, self._packed)
        if self._lanes is not None:
            return self(x).float()
        return wide_linear(x, self._dense(), is_batch_invariant=self._is_batch_invariant)

    def argmax(self, x: Tensor) -> Tensor:
        return argmax(self.logits(x)) if self._packed is None else packed_argmax(x, self._packed)

    def select_rows(self, row_ids: Tensor) -> Tensor:
        return self._dense().index_select(0, row_ids)

    def _dense(self) -> Tensor:
        assert isinstance(self.weight, Tensor)
        return self.weight
