"""The index of the largest element of a row; of equal ones the first."""

from __future__ import annotations

from torch import Tensor


def argmax(x: Tensor) -> Tensor:
    """x [R, n] -> [R] int64."""
    return x.argmax(-1)
