"""FP32 GEMMs on AVX-512: twelve rows by 32 columns at a time, with the sums in registers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.compile import compiled
from kernels.cpu.gemm.gemm_common import BLOCK, SUM_BYTES, add_form, is_packed, is_whole
from kernels.cpu.simd.cpu_features import has_avx512
from kernels.cpu.simd.f32x32 import same, store_floats
from kernels.cpu.simd.intrinsics import add_chains

_f32 = np.float32

NUM_DIMS = 3  # dimensions of a packed weight
PIECE = 256  # elements of K: this part of a block of columns stays in the L1 cache for all rows
MOST_ROWS = 12  # 24 of the 32 registers hold sums


def can_pack_floats(weight: Tensor) -> bool:
    """Whether a weight [N, K] is in host memory with full FP32 blocks and the CPU has AVX-512."""
    return is_whole(weight, torch.float32) and has_avx512()


def is_packed_floats(weight: Tensor) -> bool:
    return weight.dim() == NUM_DIMS


def pack_floats(weight: Tensor) -> Tensor:
    """weight [N, K] -> [N / 32, K, 32]."""
    return weight.view(len(weight) // BLOCK, BLOCK, -1).transpose(1, 2).contiguous()


@compiled()
def _sum(
    rows: Any,
    num_rows: int,
    weight: Any,
    block: int,
    opened: int,
    first: int,
    end: int,
    cursor: int,
    sums_at: int,
) -> int:
    """Processes all rows together: FP32 rows have the same stride across blocks as within one."""
    width, sums = weight.shape[1], (sums_at, SUM_BYTES)
    for row in range(num_rows):
        store_floats(same(_f32(0.0)), sums_at + row * SUM_BYTES)
    block_at = weight.ctypes.data + block * width * SUM_BYTES
    for column in range(first * BLOCK, end * BLOCK, PIECE):
        factors = rows.address + column * 4, rows.row_bytes
        columns = block_at + column * SUM_BYTES, SUM_BYTES
        length = min(PIECE, end * BLOCK - column)
        add_chains(sums, factors, columns, length, num_rows, BLOCK, MOST_ROWS, False)
    return cursor


add_form(
    is_packed(NUM_DIMS),
    _sum,
    blocks=lambda weight: weight.shape[0],
    steps=lambda weight: weight.shape[1] // BLOCK,
)
