"""The dense weight of a split one: bits = sign << 15 | (base + code) << 7 | mantissa.

Memory-bound: 12 bits per weight are read and 16 written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check_tensor import expect
from kernels.gpu.gemm.split_tile import first_half, second_half, upper_codes, weight_index
from kernels.integers import cdiv
from kernels.split_weight import HALF, SplitWeight

BLOCK_ROWS, BLOCK_BYTES = 32, 128
NUM_WARPS = 4


def decompress(weight: SplitWeight, out: Tensor | None = None) -> Tensor:
    """Computes kernels.reference.decompress with Triton. Raises BadTensor."""
    num_rows, width = weight.shape
    if out is None:
        out = torch.empty((num_rows, width), dtype=torch.bfloat16, device=weight.device)
    expect("out", out, weight.shape, dtype=torch.bfloat16, device=weight.device)
    if not out.numel():
        return out
    grid = cdiv(num_rows, BLOCK_ROWS), cdiv(weight.exponents.shape[1], BLOCK_BYTES)
    _decompress_kernel[grid](
        *weight.planes().values(),
        out,
        *(out.stride(0), num_rows, width, weight.exponents.shape[1], weight.is_wide.shape[1]),
        IS_EVEN_K=width % (2 * BLOCK_BYTES) == 0,
        ROWS=BLOCK_ROWS,
        BYTES=BLOCK_BYTES,
        HALF=HALF,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return out


@triton.jit
def _decompress_kernel(
    sign_mantissa_ptr,
    exponents_ptr,
    base_ptr,
    is_wide_ptr,
    wide_start_ptr,
    wide_exponents_ptr,
    out_ptr,
    stride_out_row,
    num_rows,
    width,
    row_bytes,
    num_words,
    IS_EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    HALF: tl.constexpr,
):
    first_row = tl.program_id(0) * ROWS
    # rows beyond the last are decoded from the first ones, and not stored
    row = (first_row + tl.arange(0, ROWS)) % num_rows
    is_row = (first_row + tl.arange(0, ROWS) < num_rows)[:, None]
    byte = (tl.program_id(1) * BYTES + tl.arange(0, BYTES))[None, :]  # [1, BYTES]
    k = weight_index(byte)
    rest_ptr = sign_mantissa_ptr + row[:, None].to(tl.int64) * width + k  # [ROWS, BYTES]
    lower_ptr = exponents_ptr + row[:, None].to(tl.int64) * row_bytes + byte
    if IS_EVEN_K:
        lower = tl.load(lower_ptr)
        first_rest = tl.load(rest_ptr)
        second_rest = tl.load(rest_ptr + HALF)
    else:
        lower = tl.load(lower_ptr, mask=byte < row_bytes, other=0)
        first_rest = tl.load(rest_ptr, mask=k < width, other=0)
        second_rest = tl.load(rest_ptr + HALF, mask=k + HALF < width, other=0)
    first_group = tl.program_id(1) * (BYTES // HALF)
    upper = upper_codes(
        is_wide_ptr, wide_start_ptr, wide_exponents_ptr, row, first_group, num_words, BYTES
    )
    base_bits = tl.load(base_ptr + row[:, None]).to(tl.int16) << 7  # [ROWS, 1]
    place = row[:, None].to(tl.int64) * stride_out_row + k
    first = first_half(first_rest, lower, upper, base_bits)
    tl.store(out_ptr + place, first, mask=is_row & (k < width))
    second = second_half(second_rest, lower, upper, base_bits)
    tl.store(out_ptr + place + HALF, second, mask=is_row & (k + HALF < width))
