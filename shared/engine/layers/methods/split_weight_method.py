"""A BF16 weight in 12 bits per element, decoded on CUDA on its way into the tensor cores."""

from __future__ import annotations

from torch import Tensor

from kernels.ops import (
    SplitWeight,
    SumLanes,
    argmax,
    compressed_lane_linear,
    compressed_linear,
    decompress,
    lane_sums,
    select_split_rows,
)


class SplitWeightMethod:
    has_custom_gemm = True

    def __init__(
        self, weight: SplitWeight, *, is_batch_invariant: bool, lanes: SumLanes | None = None
    ) -> None:
        self.weight = weight
        self._is_batch_invariant = is_batch_invariant
        self._lanes = lanes

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._lanes is not None and self._is_batch_invariant:
            return compressed_lane_linear(x, self.weight, bias, lanes=self._lanes)
        return compressed_linear(x, self.weight, bias, is_batch_invariant=self._is_batch_invariant)

    def partials(self, x: Tensor, num_sums: int = 1) -> Tensor:
        if self._lanes is None:
            raise ValueError("this GEMM does not sum in lanes")
        return lane_sums(x, decompress(self.weight), lanes=self._lanes, num_sums=num_sums)

    def logits(self, x: Tensor) -> Tensor:
        return self(x).float()

    def argmax(self, x: Tensor) -> Tensor:
        return argmax(self.logits(x))

    def select_rows(self, row_ids: Tensor) -> Tensor:
        return select_split_rows(self.weight, row_ids)
