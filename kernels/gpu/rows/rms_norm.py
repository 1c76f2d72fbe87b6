"""RMS normalisation: y = (x · rsqrt(mean(x²) + eps)) · weight, one row per token.

Memory-bound: a row is read once, held in registers, and written once. Batch-invariant: a program
has one row and a number of warps that depends only on its width, so that a row's squares are
added in the same order in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import FLOATS, expect
from kernels.integers import next_power_of_2

ELEMENTS_PER_WARP = 1024
MAX_WARPS = 16


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    has_unit_offset: bool = False,
    is_rounded_once: bool = False,
) -> Tensor:
    """Computes kernels.reference.rms_norm with Triton. Raises BadTensor."""
    mode = {"has_unit_offset": has_unit_offset, "is_rounded_once": is_rounded_once}
    return norm(x, None, weight, eps, **mode)[0]


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    has_unit_offset: bool,
    is_rounded_once: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the normalised sum (or x, if residual is None) and the sum. Raises BadTensor."""
    shape, hidden = x.shape, x.shape[-1]
    expect("x", x, shape, dtype=FLOATS)
    expect("weight", weight, (hidden,), dtype=x.dtype, device=x.device)
    rows = x if len(shape) == 2 else x.reshape(-1, hidden)
    out = x.new_empty(shape)
    added, total = rows, x
    if residual is not None:
        added = residual if len(shape) == 2 else residual.reshape(-1, hidden)
        total = torch.empty_like(out)
    if not out.numel():
        return out, total
    block = next_power_of_2(hidden)
    _rms_norm_kernel[(rows.shape[0],)](
        *(rows, added, weight, out, total),
        *(rows.stride(0), added.stride(0)),
        *(hidden, eps),
        HAS_RESIDUAL=residual is not None,
        HAS_UNIT_OFFSET=has_unit_offset,
        IS_ROUNDED_ONCE=is_rounded_once,
        BLOCK=block,
        num_warps=max(1, min(MAX_WARPS, block // ELEMENTS_PER_WARP)),
        enable_fp_fusion=True,
    )
    return out, total


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    stride_x_row,
    stride_residual_row,
    hidden,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_UNIT_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_ROUNDED_ONCE: tl.constexpr = False,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_inside = column < hidden  # [BLOCK]
    dtype = out_ptr.dtype.element_ty
    wide = tl.load(x_ptr + row * stride_x_row + column, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        added = tl.load(
            residual_ptr + row * stride_residual_row + column, mask=is_inside, other=0.0
        )
        total = (wide + added.to(tl.float32)).to(dtype)
        tl.store(total_ptr + row * hidden + column, total, mask=is_inside)
        wide = total.to(tl.float32)
    mean = tl.sum(wide * wide, axis=0) / hidden
    scaled = wide * tl.rsqrt(mean + eps)
    weight = tl.load(weight_ptr + column, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_UNIT_OFFSET:
        out = scaled * (weight + 1.0)
    elif IS_ROUNDED_ONCE:
        out = scaled * weight
    else:  # rounds the product as the checkpoints' own code does, in their dtype
        out = scaled.to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + row * hidden + column, out.to(dtype), mask=is_inside)
