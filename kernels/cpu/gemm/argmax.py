"""The largest column of each row of x · weightᵀ, without that product in memory.

For 32,000 columns and 64 rows the product takes 8 MB; writing and rereading them takes longer than
comparing the columns in registers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from kernels.cpu.compile import compiled
from kernels.cpu.gemm.gemm_common import (
    BLOCK,
    SUM_BYTES,
    chunk_rows,
    num_blocks,
    plain_rows,
    sum_products,
)
from kernels.cpu.simd.amx_tiles import aligned
from kernels.cpu.simd.dtype_convert import rounded_as
from kernels.cpu.simd.f32x32 import first_equal, largest, load_floats
from kernels.cpu.simd.intrinsics import array
from kernels.cpu.simd.tasks import num_tasks


def packed_argmax(x: Tensor, weight: Any) -> Tensor:
    """x [T, K] -> [T] int64: argmax of `packed_linear`; the first index among equal maxima."""
    shape = num_tasks(num_blocks(weight)), len(x)
    tops, columns = np.empty(shape, np.float32), np.empty(shape, np.int64)
    _argmax(array(x.contiguous()), weight, tops, columns)
    return torch.from_numpy(columns[tops.argmax(0), np.arange(len(x))])


@compiled(parallel=True)
def _argmax(x: Any, weight: Any, tops: Any, columns: Any) -> None:
    total, most_rows = num_blocks(weight), chunk_rows(x.itemsize)
    for task in prange(len(tops)):
        first, end = total * task // len(tops), total * (task + 1) // len(tops)
        sums = aligned(most_rows * SUM_BYTES)
        for row in range(len(x)):
            tops[task, row], columns[task, row] = -np.inf, first * BLOCK
        for low in range(0, len(x), most_rows):
            num_rows = min(most_rows, len(x) - low)
            rows = plain_rows(x[low:].ctypes.data, x.shape[1], x.itemsize)
            for block in range(first, end):
                sum_products(rows, num_rows, weight, block, sums.ctypes.data)
                for row in range(num_rows):
                    scores = rounded_as(load_floats(sums.ctypes.data + row * SUM_BYTES), x.dtype)
                    top = largest(scores)
                    if top > tops[task, low + row]:
                        tops[task, low + row] = top
                        columns[task, low + row] = block * BLOCK + first_equal(scores, top)
