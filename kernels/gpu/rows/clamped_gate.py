"""The gate of experts with biases: (up + 1) · gate · sigmoid(alpha · gate), both clamped.

In FP32, rounded once; NaN stays NaN. Memory-bound: gate and up are read once, the biases of an
expert come from the cache, and the result is written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import FLOATS, BadTensor, expect
from kernels.gpu.rows.gated import BLOCK_COLUMNS, ELEMENTS_PER_WARP
from kernels.integers import cdiv, next_power_of_2


def clamped_gate(
    gate_up: Tensor, bias: Tensor, experts: Tensor, *, limit: float, alpha: float
) -> Tensor:
    """Computes kernels.reference.gated.clamped_gate with Triton. Raises BadTensor."""
    expect("gate_up", gate_up, (None, None), dtype=FLOATS)
    num_rows, num_columns = gate_up.shape
    if num_columns % 2:
        raise BadTensor(f"gate_up has {num_columns} columns, not an even number")
    same = {"device": gate_up.device, "is_contiguous": True}
    expect("bias", bias, (None, num_columns), dtype=gate_up.dtype, **same)  # type: ignore[arg-type]
    expect("experts", experts, (num_rows,), dtype=torch.int64, **same)  # type: ignore[arg-type]
    width = num_columns // 2
    out = gate_up.new_empty((num_rows, width))
    if not out.numel():
        return out
    block = min(BLOCK_COLUMNS, next_power_of_2(width))
    _clamped_gate_kernel[(num_rows * cdiv(width, block),)](
        *(gate_up, bias, experts, out, gate_up.stride(0), width, limit, alpha),
        BLOCK_COLUMNS=block,
        num_warps=max(1, block // ELEMENTS_PER_WARP),
        enable_fp_fusion=True,
    )
    return out


@triton.jit
def _clamped_gate_kernel(
    gate_up_ptr,
    bias_ptr,
    experts_ptr,
    out_ptr,
    stride_gate_up_row,
    width,
    limit,
    alpha,
    BLOCK_COLUMNS: tl.constexpr,
):
    num_blocks = tl.cdiv(width, BLOCK_COLUMNS)
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    column = tl.program_id(0) % num_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_column = column < width  # [BLOCK_COLUMNS]
    gate_ptrs = gate_up_ptr + row * stride_gate_up_row + column
    bias_ptrs = bias_ptr + tl.load(experts_ptr + row) * (2 * width) + column
    gate = tl.load(gate_ptrs, mask=is_column, other=0.0).to(tl.float32)  # [BLOCK_COLUMNS]
    up = tl.load(gate_ptrs + width, mask=is_column, other=0.0).to(tl.float32)
    gate += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)
    up += tl.load(bias_ptrs + width, mask=is_column, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    out = gate / (1.0 + tl.exp(tl.minimum(-alpha * gate, 88.0))) * (up + 1.0)
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=is_column)
