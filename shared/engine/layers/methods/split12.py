"""A BF16 weight in 12 bits per element, decoded on CUDA on its way into the tensor cores."""

from __future__ import annotations

from torch import Tensor

from kernels.ops import argmax, compressed_linear, select_split_rows
from kernels.split_weight import SplitWeight


class Split12Method:
    has_custom_gemm = True

    def __init__(self, weight: SplitWeight, *, is_batch_invariant: bool) -> None:
        self.weight = weight
        self._is_batch_invariant = is_batch_invariant

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return compressed_linear(x, self.weight, bias, is_batch_invariant=self._is_batch_invariant)

    def logits(self, x: Tensor) -> Tensor:
        return self(x).float()

    def argmax(self, x: Tensor) -> Tensor:
        return argmax(self.logits(x))

    def select_rows(self, row_ids: Tensor) -> Tensor:
        return select_split_rows(self.weight, row_ids)
