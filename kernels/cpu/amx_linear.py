"""y = x · weightᵀ in BF16 on AMX's tiles.

A block of 32 x 32 outputs is summed in four tiles over all of K, in one order: a row's bits depend
neither on the other rows nor on the number of threads. (oneDNN cuts K by the number of rows.)
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import prange
from torch import Tensor

from kernels.cpu.amx import (
    TILE_ROWS,
    aligned,
    expect_store,
    has_amx,
    round_to_bf16,
    tile_config,
    tile_configure,
    tile_load,
    tile_multiply,
    tile_release,
    tile_store,
    tile_zero,
)
from kernels.cpu.compiled import compiled
from kernels.cpu.lanes import array, expect_load

BLOCK = 32  # of rows, of columns, and of K
CHUNK_ROWS = 256  # so many rows of x stay in a core's second cache while the weight goes by
STEP_BYTES = 2048  # of 32 columns, for 32 of K
PIECE_STEPS = 8
LINE_BYTES = 64
STEP_LINES = STEP_BYTES // LINE_BYTES
MAX_AHEAD = 8  # of a step: with more, they stand in the way of what is needed now

# Configurations by the number of rows of a block, less one.
CONFIGS = np.stack(
    [tile_config(min(rows, TILE_ROWS), max(rows - TILE_ROWS, 1)) for rows in range(1, BLOCK + 1)]
)


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


def amx_linear(x: Tensor, packed: Tensor) -> Tensor:
    """x [T, K] -> [T, N], rounded once."""
    y = x.new_empty(x.shape[0], packed.shape[0] * BLOCK)
    num_tasks = min(numba.get_num_threads(), packed.shape[0])
    _linear(array(x.contiguous()), array(packed), CONFIGS, num_tasks, array(y))
    return y


@compiled(parallel=True)
def _linear(x: Any, weight: Any, configs: Any, num_tasks: int, y: Any) -> None:
    num_rows, num_blocks = x.shape[0], weight.shape[0]
    for task in prange(num_tasks):
        first, end = num_blocks * task // num_tasks, num_blocks * (task + 1) // num_tasks
        sums = aligned(CHUNK_ROWS * BLOCK * 4)
        for low in range(0, num_rows, CHUNK_ROWS):
            high = min(low + CHUNK_ROWS, num_rows)
            _multiply_rows(x, weight, configs, low, high, first, end, sums, y)
        tile_release()


@compiled()
def _multiply_rows(
    x: Any, weight: Any, configs: Any, low: int, high: int, first: int, end: int, sums: Any, y: Any
) -> None:
    """Rows [low, high) by the weight's blocks [first, end).

    Where there are more rows than one block has, K is cut so that a piece of the weight stays in
    the first cache while they go by, and the next piece is fetched meanwhile.
    """
    num_steps, row_bytes, y_bytes = weight.shape[1], x.shape[1] * 2, y.shape[1] * 2
    num_row_blocks = (high - low + BLOCK - 1) // BLOCK
    num_pieces = (num_steps + PIECE_STEPS - 1) // PIECE_STEPS if num_row_blocks > 1 else 1
    # A single block of rows waits for memory in any case, which fetches in its own order best.
    num_ahead = min(STEP_LINES // num_row_blocks, MAX_AHEAD) if num_row_blocks > 1 else 0
    tile_rows = 0
    for block in range(first, end):
        for piece in range(num_pieces):
            step = num_steps * piece // num_pieces
            piece_steps = num_steps * (piece + 1) // num_pieces - step
            columns_at = weight.ctypes.data + (block * num_steps + step) * STEP_BYTES
            ahead_at = columns_at + piece_steps * STEP_BYTES
            for row in range(low, high, BLOCK):
                num_rows = min(BLOCK, high - row)
                if num_rows != tile_rows:
                    tile_configure(configs[num_rows - 1].ctypes.data)
                    tile_rows = num_rows
                x_at = x.ctypes.data + row * row_bytes + step * BLOCK * 2
                y_at = y.ctypes.data + row * y_bytes + block * BLOCK * 2
                sums_at = sums.ctypes.data + (row - low) * BLOCK * 4
                if piece == num_pieces - 1:
                    for r in range(num_rows):
                        expect_store(y_at + r * y_bytes)
                multiply_block(
                    x_at,
                    row_bytes,
                    columns_at,
                    piece_steps,
                    num_rows,
                    sums_at,
                    BLOCK * 4,
                    piece == 0,
                    ahead_at,
                    num_ahead,
                )
                ahead_at += piece_steps * num_ahead * LINE_BYTES
                if piece == num_pieces - 1:
                    for r in range(num_rows):
                        round_to_bf16(sums_at + r * BLOCK * 4, y_at + r * y_bytes)


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
) -> None:
    """Up to 32 rows of BF16 by columns [num_steps, 16, 32, 2], as FP32 to `sums_at`.

    The tiles are configured for `num_rows`; rows lie `row_bytes` and `sum_bytes` apart. Unless it
    is the first product, it is added to what the sums hold. At each step `num_ahead` cache lines
    are fetched, from `ahead_at` on: of what is multiplied later.
    """
    is_tall = num_rows > TILE_ROWS
    load_sums(sums_at, sum_bytes, is_tall, is_first)
    for step in range(num_steps):
        for line in range(num_ahead):
            expect_load(ahead_at + (step * num_ahead + line) * LINE_BYTES)
        multiply_step(rows_at + step * 64, row_bytes, columns_at + step * STEP_BYTES, is_tall)
    store_sums(sums_at, sum_bytes, is_tall)


@compiled()
def load_sums(sums_at: int, sum_bytes: int, is_tall: bool, is_first: bool) -> None:
    """To the tiles; zeros for the first product."""
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
