"""BF16 GEMMs on AMX tiles: four tiles accumulate a block of 32 x 32 outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.compile import compiled
from kernels.cpu.gemm.gemm_common import BLOCK, SUM_BYTES, add_form, is_packed, is_whole
from kernels.cpu.simd.amx_tiles import (
    TILE_ROWS,
    tile_config,
    tile_configure,
    tile_load,
    tile_multiply,
    tile_release,
    tile_store,
    tile_zero,
)
from kernels.cpu.simd.cpu_features import has_amx
from kernels.cpu.simd.intrinsics import expect_load

NUM_DIMS = 5  # dimensions of a packed weight
STEP_BYTES = 2048  # 32 columns, for 32 elements of K
ROW_BYTES = BLOCK * 2  # 32 elements of K of a row
PIECE_STEPS = 8
LINE_BYTES = 64
STEP_LINES = STEP_BYTES // LINE_BYTES
MAX_AHEAD = 8  # cache lines per step: more prefetches delay the loads that are needed now

# Tile configurations, indexed by the number of rows of a block minus one.
_CONFIGS = np.stack(
    [tile_config(min(rows, TILE_ROWS), max(rows - TILE_ROWS, 1)) for rows in range(1, BLOCK + 1)]
)


def can_pack_for_amx(weight: Tensor) -> bool:
    """Whether a weight [N, K] is in host memory with full BF16 blocks and the CPU has AMX."""
    return is_whole(weight, torch.bfloat16) and has_amx()


def is_packed_for_amx(weight: Tensor) -> bool:
    return weight.dim() == NUM_DIMS


def pack_for_amx(weight: Tensor) -> Tensor:
    """weight [N, K] -> [N / 32, K / 32, 16, 32, 2]: pairs along K are adjacent."""
    num_rows, num_columns = weight.shape
    blocks = weight.view(num_rows // BLOCK, BLOCK, num_columns // BLOCK, BLOCK // 2, 2)
    return blocks.permute(0, 2, 3, 1, 4).contiguous()


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
    """Sums the products over steps of K. For more than one block of rows, these are cut so that a
    part of the weight stays in the L1 cache for all rows, while the next part is prefetched.
    """
    all_steps = end - first
    num_row_blocks = (num_rows + BLOCK - 1) // BLOCK
    num_pieces = max((all_steps + PIECE_STEPS - 1) // PIECE_STEPS, 1) if num_row_blocks > 1 else 1
    # A single block of rows is memory-bound, and the CPU's own prefetch order is then the best one.
    num_ahead = min(STEP_LINES // num_row_blocks, MAX_AHEAD) if num_row_blocks > 1 else 0
    configured = 0
    for piece in range(num_pieces):
        step = first + all_steps * piece // num_pieces
        piece_steps = first + all_steps * (piece + 1) // num_pieces - step
        columns_at = weight.ctypes.data + (block * weight.shape[1] + step) * STEP_BYTES
        ahead_at = columns_at + piece_steps * STEP_BYTES
        for index in range(num_row_blocks):
            block_rows = min(BLOCK, num_rows - index * BLOCK)
            if block_rows != configured:
                configure_for(block_rows)
                configured = block_rows
            multiply_block(
                rows.address + index * rows.block_bytes + step * rows.step_bytes,
                rows.row_bytes,
                columns_at,
                piece_steps,
                block_rows,
                sums_at + index * BLOCK * SUM_BYTES,
                SUM_BYTES,
                piece == 0,
                ahead_at,
                num_ahead,
                rows.step_bytes,
            )
            ahead_at += piece_steps * num_ahead * LINE_BYTES
    tile_release()
    return cursor


add_form(
    is_packed(NUM_DIMS),
    _sum,
    blocks=lambda weight: weight.shape[0],
    steps=lambda weight: weight.shape[1],
)


@compiled()
def configure_for(num_rows: int) -> None:
    """Configures the tiles for a block of `num_rows` rows."""
    tile_configure(_CONFIGS[num_rows - 1].ctypes.data)


@compiled()
def multiply_block(
    rows_at: int,
    row_bytes: int,
    columns_at: int,
    num_steps: int,
    num_rows: int,
    sums_at: int,
    sum_bytes: int,
    is_first: bool,
    ahead_at: int = 0,
    num_ahead: int = 0,
    step_bytes: int = ROW_BYTES,
) -> None:
    """Multiplies up to 32 BF16 rows by columns [num_steps, 16, 32, 2], as FP32 to `sums_at`.

    The tiles must be configured for `num_rows`; row strides are `row_bytes` and `sum_bytes`. Unless
    `is_first`, the product is added to the existing sums. Each step prefetches `num_ahead` cache
    lines from `ahead_at` on, which later products read.
    """
    is_tall = num_rows > TILE_ROWS
    load_sums(sums_at, sum_bytes, is_tall, is_first)
    for step in range(num_steps):
        for line in range(num_ahead):
            expect_load(ahead_at + (step * num_ahead + line) * LINE_BYTES)
        multiply_step(
            rows_at + step * step_bytes, row_bytes, columns_at + step * STEP_BYTES, is_tall
        )
    store_sums(sums_at, sum_bytes, is_tall)


@compiled()
def load_sums(sums_at: int, sum_bytes: int, is_tall: bool, is_first: bool) -> None:
    """Loads the sums into the tiles; zeros if `is_first`."""
    if is_first:
        tile_zero(0)
        tile_zero(1)
        if is_tall:
            tile_zero(2)
            tile_zero(3)
    else:
        tile_load(0, sums_at, sum_bytes)
        tile_load(1, sums_at + 64, sum_bytes)
        if is_tall:
            lower_at = sums_at + TILE_ROWS * sum_bytes
            tile_load(2, lower_at, sum_bytes)
            tile_load(3, lower_at + 64, sum_bytes)


@compiled()
def multiply_step(rows_at: int, row_bytes: int, columns_at: int, is_tall: bool) -> None:
    """Adds the product of one step of K to the sums."""
    tile_load(4, rows_at, row_bytes)
    tile_load(6, columns_at, 128)
    tile_load(7, columns_at + 64, 128)
    tile_multiply(0, 4, 6)
    tile_multiply(1, 4, 7)
    if is_tall:
        tile_load(5, rows_at + TILE_ROWS * row_bytes, row_bytes)
        tile_multiply(2, 5, 6)
        tile_multiply(3, 5, 7)


@compiled()
def store_sums(sums_at: int, sum_bytes: int, is_tall: bool) -> None:
    tile_store(0, sums_at, sum_bytes)
    tile_store(1, sums_at + 64, sum_bytes)
    if is_tall:
        lower_at = sums_at + TILE_ROWS * sum_bytes
        tile_store(2, lower_at, sum_bytes)
        tile_store(3, lower_at + 64, sum_bytes)
