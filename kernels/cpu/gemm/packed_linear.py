"""y = x · weightᵀ with a weight packed for this package's GEMMs; see gemm_common.py."""

from __future__ import annotations

from typing import Any

import torch
from numba import prange
from torch import Tensor

from kernels.cpu.compile import compiled
from kernels.cpu.gemm.avx512_fp32_gemm import is_packed_floats
from kernels.cpu.gemm.bf16_gemm import is_packed_halves
from kernels.cpu.gemm.compressed_gemm import planes_for_tiles
from kernels.cpu.gemm.compressed_weight import CompressedWeight
from kernels.cpu.gemm.gemm_common import (
    BLOCK,
    SUM_BYTES,
    chunk_rows,
    num_blocks,
    plain_rows,
    sum_products,
)
from kernels.cpu.gemm.quantized.quantized_gemm import planes_for_gemm
from kernels.cpu.simd.amx_tiles import aligned
from kernels.cpu.simd.dtype_convert import rounded_as, store_numbers
from kernels.cpu.simd.f32x32 import load_floats
from kernels.cpu.simd.intrinsics import array
from kernels.cpu.simd.tasks import num_tasks
from kernels.quantized_weight import QuantizedWeight


def for_gemm(weight: Any) -> Any:
    """A weight as `sum_products` takes it; None if it is not in one of this package's forms."""
    if isinstance(weight, CompressedWeight):
        return planes_for_tiles(weight)
    if isinstance(weight, QuantizedWeight):
        return planes_for_gemm(weight)
    is_packed = isinstance(weight, Tensor) and is_packed_for_gemm(weight)
    return array(weight) if is_packed else None


def is_packed_for_gemm(weight: Tensor) -> bool:
    """Whether a dense weight is packed for this package's GEMMs."""
    return is_packed_halves(weight) or is_packed_floats(weight)


def packed_linear(x: Tensor, weight: Any, *, dtype: torch.dtype | None = None) -> Tensor:
    """x [T, K], `weight` as `sum_products` takes it -> [T, N], rounded once to the dtype of x.

    The result is stored in `dtype`: that of x, or FP32.
    """
    y = x.new_empty(x.shape[0], num_blocks(weight) * BLOCK, dtype=dtype)
    _linear(array(x.contiguous()), weight, num_tasks(num_blocks(weight)), array(y))
    return y


@compiled(parallel=True)
def _linear(x: Any, weight: Any, num_tasks: int, y: Any) -> None:
    total, most_rows = num_blocks(weight), chunk_rows(x.itemsize)
    for task in prange(num_tasks):
        first, end = total * task // num_tasks, total * (task + 1) // num_tasks
        sums = aligned(most_rows * SUM_BYTES)
        for low in range(0, len(x), most_rows):
            high = min(low + most_rows, len(x))
            rows = plain_rows(x[low:].ctypes.data, x.shape[1], x.itemsize)
            multiply_rows(rows, high - low, weight, first, end, sums, y[low:high], x.dtype)


@compiled()
def multiply_rows(
    rows: Any, num_rows: int, weight: Any, first: int, end: int, sums: Any, y: Any, dtype: Any
) -> None:
    """y [T, N] = rows · weightᵀ, rounded to `dtype`, by blocks [first, end) of columns."""
    row_bytes, sums_at = y.strides[0], sums.ctypes.data
    for block in range(first, end):
        sum_products(rows, num_rows, weight, block, sums_at)
        y_at = y.ctypes.data + block * BLOCK * y.itemsize
        for row in range(num_rows):
            sums_of_row = rounded_as(load_floats(sums_at + row * SUM_BYTES), dtype)
            store_numbers(sums_of_row, y_at + row * row_bytes, y.dtype, BLOCK)
