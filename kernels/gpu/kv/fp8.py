"""FP32 to FP8 e4m3, with the same rounding on every device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import BadTensor, expect
from kernels.device import IS_INTERPRETED, compute_capability
from kernels.reference.store_kv import FP8_LARGEST

_IS_INTERPRETED = tl.constexpr(IS_INTERPRETED)
_LARGEST = tl.constexpr(FP8_LARGEST)


def expect_scales(kv_scales: Tensor, num_kv_heads: int, device: torch.device) -> None:
    """Checks the scales of a cache in FP8. Raises BadTensor, also for a device without FP8."""
    if device.type == "cuda" and compute_capability(device) < 89:
        raise BadTensor("kv_cache is FP8, which needs compute capability 8.9 or more")
    expect(
        "kv_scales",
        kv_scales,
        (2, num_kv_heads),
        dtype=torch.float32,
        device=device,
        is_contiguous=True,
    )


@triton.jit
def scaled(x, scale_ptrs, mask):
    """x [R, D] as FP8, with a scale for each row. scale_ptrs, mask [R, 1]"""
    inverse = tl.div_rn(1.0, tl.load(scale_ptrs, mask=mask, other=1.0))  # [R, 1]
    return to_fp8(x.to(tl.float32) * inverse)


@triton.jit
def to_fp8(x):
    """Rounds to nearest even; saturates, and preserves NaN."""
    x = tl.clamp(x, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if _IS_INTERPRETED:  # misrounds values that are not already FP8 numbers
        x = _on_the_grid(x)
    return x.to(tl.float8e4nv)


@triton.jit
def _on_the_grid(x):
    """Rounds |x| to the steps of FP8, 2**(e - 3) and at least 2**-9, by adding a float with these
    steps and subtracting it again. (A float of exponent e has steps of 2**(e - 23).)
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, 127 - 6)
    coarse = ((exponent + 20) << 23).to(tl.float32, bitcast=True)
    rounded = ((tl.abs(x) + coarse) - coarse).to(tl.int32, bitcast=True)
    return (rounded | (bits & -0x80000000)).to(tl.float32, bitcast=True)
