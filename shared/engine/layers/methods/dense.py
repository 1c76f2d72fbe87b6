"""A dense weight, plain or packed for the CPU's products."""

from __future__ import annotations

from torch import Tensor

from kernels.ops import argmax, linear, packed_argmax, packed_form, packed_logits


class DenseMethod:
    """`weight` [N, K], or the result of `pack_weight`; a plain one may be filled later."""

    def __init__(self, weight: Tensor, *, is_batch_invariant: bool) -> None:
        self.weight = weight
        self._is_batch_invariant = is_batch_invariant
        self._packed = packed_form(weight)

    @property
    def has_custom_gemm(self) -> bool:
        return self._packed is not None

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, self.weight, bias, is_batch_invariant=self._is_batch_invariant)

    def logits(self, x: Tensor) -> Tensor:
        return self(x).float() if self._packed is None else packed_logits(x, self._packed)

    def argmax(self, x: Tensor) -> Tensor:
        return argmax(self.logits(x)) if self._packed is None else packed_argmax(x, self._packed)

    def select_rows(self, row_ids: Tensor) -> Tensor:
        return self.weight.index_select(0, row_ids)
