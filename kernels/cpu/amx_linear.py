"""y = x · weightᵀ in BF16 on AMX's tiles."""

from __future__ import annotations

from typing import Any

import torch
from numba import prange
from torch import Tensor

from kernels.cpu.amx import aligned, has_amx, round_to_bf16, tile_release
from kernels.cpu.amx_products import (
    BLOCK,
    CHUNK_ROWS,
    CONFIGS,
    SUM_BYTES,
    num_blocks,
    plain_rows,
    sum_products,
)
from kernels.cpu.compiled import compiled
from kernels.cpu.floats import load_floats, rounded, store_floats
from kernels.cpu.lanes import array
from kernels.cpu.tasks import num_tasks


def can_pack_for_amx(weight: Tensor) -> bool:
    """Of a weight [N, K] in a host's memory, if its CPU has AMX."""
    is_whole = weight.is_cpu and all(size % BLOCK == 0 for size in weight.shape)
    return is_whole and weight.dtype == torch.bfloat16 and has_amx()


def is_packed_for_amx(weight: Tensor) -> bool:
    return weight.dim() == 5


def pack_for_amx(weight: Tensor) -> Tensor:
    """weight [N, K] -> [N / 32, K / 32, 16, 32, 2]: pairs of K next to each other."""
    num_rows, num_columns = weight.shape
    blocks = weight.view(num_rows // BLOCK, BLOCK, num_columns // BLOCK, BLOCK // 2, 2)
    return blocks.permute(0, 2, 3, 1, 4).contiguous()


def amx_linear(x: Tensor, packed: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x [T, K] -> [T, N], rounded once to BF16, and held in `dtype`: BF16 or FP32."""
    return packed_linear(x, array(packed), dtype=dtype)


def packed_linear(x: Tensor, weight: Any, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`weight`: as `sum_products` takes it."""
    y = x.new_empty(x.shape[0], num_blocks(weight) * BLOCK, dtype=dtype)
    _linear(array(x.contiguous()), weight, CONFIGS, num_tasks(num_blocks(weight)), array(y))
    return y


@compiled(parallel=True)
def _linear(x: Any, weight: Any, configs: Any, num_tasks: int, y: Any) -> None:
    total = num_blocks(weight)
    for task in prange(num_tasks):
        first, end = total * task // num_tasks, total * (task + 1) // num_tasks
        sums = aligned(CHUNK_ROWS * SUM_BYTES)
        for low in range(0, len(x), CHUNK_ROWS):
            high = min(low + CHUNK_ROWS, len(x))
            rows = plain_rows(x[low:].ctypes.data, x.shape[1])
            multiply_rows(rows, high - low, weight, first, end, configs, sums, y[low:high])
        tile_release()


@compiled()
def multiply_rows(
    rows: Any, num_rows: int, weight: Any, first: int, end: int, configs: Any, sums: Any, y: Any
) -> None:
    """y [T, N] = rows · weightᵀ, by blocks [first, end) of columns."""
    row_bytes, sums_at = y.strides[0], sums.ctypes.data
    for block in range(first, end):
        sum_products(rows, num_rows, weight, block, configs, sums_at)
        y_at = y.ctypes.data + block * BLOCK * y.itemsize
        for row in range(num_rows):
            if y.itemsize == 4:
                store_floats(
                    rounded(load_floats(sums_at + row * SUM_BYTES)), y_at + row * row_bytes
                )
            else:
                round_to_bf16(sums_at + row * SUM_BYTES, y_at + row * row_bytes)
