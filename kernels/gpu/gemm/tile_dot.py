"""A tile GEMM that is correct on every device."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.device import IS_INTERPRETED

_IS_INTERPRETED = tl.constexpr(IS_INTERPRETED)


@triton.jit
def dot(a, b, acc):
    """a [M, K] · b [K, N] + acc [M, N], computed in FP32: FP32 operands are not truncated to TF32.

    The interpreter multiplies BF16 as if it were integers, so its operands are widened.
    """
    if _IS_INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")
