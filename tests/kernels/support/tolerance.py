"""The maximum deviation of a kernel from its reference in FP32: the single table."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """`expected` in any dtype, on any device, which compares. NaN always fails."""
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(
        actual.double().to(expected.device), expected.double(), rtol=tolerance, atol=tolerance
    )
