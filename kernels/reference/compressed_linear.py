"""y = x · weightᵀ + bias for a weight in its split form: `linear` with the dense weight."""

from __future__ import annotations

from torch import Tensor

from kernels.reference.decompress import decompress
from kernels.reference.linear import linear
from kernels.split_weight import SplitWeight


def compressed_linear(
    x: Tensor, weight: SplitWeight, bias: Tensor | None = None, *, is_batch_invariant: bool = False
) -> Tensor:
    """x [M, K] BF16, weight [N, K], bias [N] -> [M, N], bit-identical to the dense weight's."""
    return linear(x, decompress(weight), bias, is_batch_invariant=is_batch_invariant)
