"""Comparisons of a kernel's result with its reference: by bits, or by the error to one in FP32."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}


def assert_near(actual: Tensor, expected: Tensor, *, has_nan: bool = False) -> None:
    """Asserts that `actual` is near `expected`, of any dtype, on the device of `expected`.

    NaN fails, or with `has_nan` must be at the same places in both.
    """
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(
        actual.double().to(expected.device),
        expected.double(),
        rtol=tolerance,
        atol=tolerance,
        equal_nan=has_nan,
    )


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """NaN always fails."""
    assert torch.equal(actual, expected)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
