"""Rotary position embedding over the two halves of a head, or of its first part (RoFormer).

    (a, b) -> (a·cos - b·sin, b·cos + a·sin)

Memory-bound: a head of a token is a row that is read once and written once; the cosines and sines
of a token are read for each of its heads, from the cache after the first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import FLOATS, BadTensor, expect

BLOCK_ELEMENTS = 2048  # of one program: 16 a thread, two loads of 16 bytes
NUM_WARPS = 4


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As kernels.reference.rotary. Raises BadTensor."""
    expect("x", x, (None, None, None), dtype=FLOATS)
    expect_angles(cos, sin, x)
    num_tokens, num_heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    blocks, unit = row_blocks(head_dim, cos.shape[1]), angle_unit(cos, sin)
    _rotary_kernel[(triton.cdiv(num_tokens * num_heads, blocks["BLOCK_ROWS"]),)](
        *(x, cos, sin, out),
        *(*x.stride()[:2], cos.stride(0) // unit, sin.stride(0) // unit),
        num_tokens * num_heads,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HALF=cos.shape[1],
        ANGLE_UNIT=unit,
        **blocks,
        num_warps=NUM_WARPS,
    )
    return out


def expect_angles(cos: Tensor, sin: Tensor, x: Tensor) -> None:
    """Raises BadTensor."""
    expect("cos", cos, (x.shape[0], None), dtype=torch.float32, device=x.device)
    expect("sin", sin, cos.shape, dtype=torch.float32, device=x.device)
    if not 0 < 2 * cos.shape[1] <= x.shape[2]:
        raise BadTensor(f"cos has {cos.shape[1]} columns for heads of {x.shape[2]} elements")


def angle_unit(cos: Tensor, sin: Tensor) -> int:
    """Strides are passed in units of 16 bytes where they are whole ones: of a number the compiler
    learns whether it is a multiple of 16, not of 4, and else it would load each angle by itself.
    """
    return 4 if cos.stride(0) % 4 == sin.stride(0) % 4 == 0 else 1


def row_blocks(head_dim: int, half: int) -> dict[str, int]:
    """Heads as rows in three pieces: both halves of the rotary part, and the rest."""
    block_half = triton.next_power_of_2(half)
    block_rest = triton.next_power_of_2(max(1, head_dim - 2 * half))
    return {
        "BLOCK_ROWS": max(1, BLOCK_ELEMENTS // max(2 * block_half, block_rest)),
        "BLOCK_HALF": block_half,
        "BLOCK_REST": block_rest,
    }


@triton.jit(do_not_specialize=["num_rows"])
def _rotary_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    stride_x_token,
    stride_x_head,
    stride_cos_token,
    stride_sin_token,
    num_rows,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    ANGLE_UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]  # [BLOCK_ROWS, 1]
    token = (row // NUM_HEADS).to(tl.int64)
    pair = tl.arange(0, BLOCK_HALF)[None, :]  # [1, BLOCK_HALF]
    is_pair = (row < num_rows) & (pair < HALF)  # [BLOCK_ROWS, BLOCK_HALF]
    x_row = x_ptr + token * stride_x_token + row % NUM_HEADS * stride_x_head
    out_row = out_ptr + row.to(tl.int64) * HEAD_DIM
    first = tl.load(x_row + pair, mask=is_pair)  # [BLOCK_ROWS, BLOCK_HALF]
    second = tl.load(x_row + HALF + pair, mask=is_pair)
    cos = tl.load(cos_ptr + token * stride_cos_token * ANGLE_UNIT + pair, mask=is_pair)
    sin = tl.load(sin_ptr + token * stride_sin_token * ANGLE_UNIT + pair, mask=is_pair)
    first, second = rotated(first.to(tl.float32), second.to(tl.float32), cos, sin)
    tl.store(out_row + pair, first.to(out_ptr.dtype.element_ty), mask=is_pair)
    tl.store(out_row + HALF + pair, second.to(out_ptr.dtype.element_ty), mask=is_pair)
    if HEAD_DIM > 2 * HALF:
        column = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]  # [1, BLOCK_REST]
        is_rest = (row < num_rows) & (column < HEAD_DIM)  # [BLOCK_ROWS, BLOCK_REST]
        tl.store(out_row + column, tl.load(x_row + column, mask=is_rest), mask=is_rest)


@triton.jit
def rotated(first, second, cos, sin):
    """All FP32, of one shape."""
    return first * cos - second * sin, second * cos + first * sin
