"""The gates of gated MLPs: silu(gate) · up and gelu(gate) · up, in FP32, rounded once.

Both are gate / (1 + exp(-t)) · up, with t = gate for silu. For the tanh form of gelu, because of
(1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)),

    t = 2u = 2 · sqrt(2 / pi) · (gate + 0.044715 gate³)

Memory-bound: gate and up are read once, their product is written once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import FLOATS, BadTensor, expect
from kernels.integers import cdiv, next_power_of_2

BLOCK_COLUMNS = 2048  # a program's part: 16 per thread, four loads of 16 bytes
ELEMENTS_PER_WARP = 512


def gated(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    """gate_up [T, 2 * intermediate], gate first -> [T, intermediate]. Raises BadTensor."""
    expect("gate_up", gate_up, (None, None), dtype=FLOATS)
    num_tokens, num_columns = gate_up.shape
    if num_columns % 2:
        raise BadTensor(f"gate_up has {num_columns} columns, not an even number")
    width = num_columns // 2
    out = gate_up.new_empty((num_tokens, width))
    if not out.numel():
        return out
    block = min(BLOCK_COLUMNS, next_power_of_2(width))
    _gated_kernel[(num_tokens * cdiv(width, block),)](
        *(gate_up, out, gate_up.stride(0), width),
        IS_GELU=is_gelu,
        BLOCK_COLUMNS=block,
        num_warps=max(1, block // ELEMENTS_PER_WARP),
        enable_fp_fusion=True,
    )
    return out


@triton.jit
def _gated_kernel(
    gate_up_ptr,
    out_ptr,
    stride_gate_up_token,
    width,
    IS_GELU: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    num_blocks = tl.cdiv(width, BLOCK_COLUMNS)
    token = (tl.program_id(0) // num_blocks).to(tl.int64)
    column = tl.program_id(0) % num_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_column = column < width  # [BLOCK_COLUMNS]
    gate_ptrs = gate_up_ptr + token * stride_gate_up_token + column
    gate = tl.load(gate_ptrs, mask=is_column, other=0.0).to(tl.float32)  # [BLOCK_COLUMNS]
    up = tl.load(gate_ptrs + width, mask=is_column, other=0.0).to(tl.float32)
    out = gated_product(gate, up, IS_GELU)
    tl.store(out_ptr + token * width + column, out.to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def gated_product(gate, up, IS_GELU: tl.constexpr):
    """FP32, not rounded."""
    if IS_GELU:
        t = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 * sqrt(2 / pi)
    else:
        t = gate
    return gate / (1.0 + tl.exp(tl.minimum(-t, 88.0))) * up  # e**88 is still finite
