"""RMS normalisation: y = (x · rsqrt(mean(x²) + eps)) · weight, one row a token.

Memory-bound: a row is read once, kept in registers, and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import FLOATS, expect

BLOCK_ELEMENTS = 4096  # of one program: short rows share one
ELEMENTS_PER_WARP = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, has_unit_offset: bool = False) -> Tensor:
    """As kernels.reference.rms_norm. Raises BadTensor."""
    return norm(x, None, weight, eps, has_unit_offset=has_unit_offset)[0]


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, has_unit_offset: bool
) -> tuple[Tensor, Tensor]:
    """The normalised sum (or x, if residual is None) and the sum. Raises BadTensor."""
    hidden = x.shape[-1]
    expect("x", x, x.shape, dtype=FLOATS)
    expect("weight", weight, (hidden,), dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, hidden)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    added = rows if residual is None else residual.reshape(-1, hidden)
    total = x if residual is None else torch.empty_like(out)
    if not rows.numel():
        return out, total
    block = triton.next_power_of_2(hidden)
    block_rows = max(1, min(BLOCK_ELEMENTS // block, triton.next_power_of_2(len(rows))))
    _rms_norm_kernel[(triton.cdiv(len(rows), block_rows),)](
        *(rows, added, weight, out, total),
        *(rows.stride(0), added.stride(0)),
        *(len(rows), hidden, eps),
        HAS_RESIDUAL=residual is not None,
        HAS_UNIT_OFFSET=has_unit_offset,
        BLOCK_ROWS=block_rows,
        BLOCK_HIDDEN=block,
        num_warps=max(1, min(16, block_rows * block // ELEMENTS_PER_WARP)),
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
    num_rows,
    hidden,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_UNIT_OFFSET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = row.to(tl.int64)[:, None]  # [BLOCK_ROWS, 1]
    column = tl.arange(0, BLOCK_HIDDEN)[None, :]  # [1, BLOCK_HIDDEN]
    is_inside = (row < num_rows) & (column < hidden)
    dtype = out_ptr.dtype.element_ty
    wide = tl.load(x_ptr + row * stride_x_row + column, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        added = tl.load(
            residual_ptr + row * stride_residual_row + column, mask=is_inside, other=0.0
        )
        total = (wide + added.to(tl.float32)).to(dtype)
        tl.store(total_ptr + row * hidden + column, total, mask=is_inside)
        wide = total.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1, keep_dims=True) / hidden  # [BLOCK_ROWS, 1]
    scaled = wide * tl.rsqrt(mean + eps)
    weight = tl.load(weight_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
    if HAS_UNIT_OFFSET:
        out = scaled * (weight + 1.0)
    else:  # the product is rounded as in the checkpoints' own code, which multiplies in their dtype
        out = scaled.to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + row * hidden + column, out.to(dtype), mask=is_inside)
