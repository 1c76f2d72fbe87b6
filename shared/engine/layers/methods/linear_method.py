"""The seam between a layer and the stored form of its weight."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kernels.ops import Weight


class LinearMethod(Protocol):
    """The computation with one weight [N, K] in one form. All lossless forms give the same bits.

    If it `has_custom_gemm`, a kernel of this project multiplies instead of torch's library.
    """

    @property
    def weight(self) -> Weight: ...

    @property
    def has_custom_gemm(self) -> bool: ...

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x · weightᵀ, rounded once, then + bias: [T, K] -> [T, N] in the dtype of x."""
        ...

    def partials(self, x: Tensor, num_sums: int = 1) -> Tensor:
        """Returns the sums of a row-parallel GEMM by subtrees of its lanes: FP32 [num_sums, T, N].

        A rank's sum of one subtree is what other ranks add to theirs. Raises ValueError for a
        weight whose GEMM does not sum in lanes.
        """
        ...

    def logits(self, x: Tensor) -> Tensor:
        """Returns the result of the GEMM as FP32: [T, K] -> [T, N]."""
        ...

    def argmax(self, x: Tensor) -> Tensor:
        """Returns the first column of each row's largest logit: [T, K] -> [T] int64."""
        ...

    def select_rows(self, row_ids: Tensor) -> Tensor:
        """Returns the rows of the weight in its dense dtype: [T] -> [T, K]."""
        ...
