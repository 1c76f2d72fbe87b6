"""Products of BF16 on AMX's tiles: up to 32 rows by 32 columns at a time, summed in FP32.

A block of 32 x 32 outputs is summed in four tiles over all of K, in one order: a row's bits depend
neither on the other rows nor on the number of threads. (oneDNN cuts K by the number of rows.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from kernels.cpu.amx import (
    TILE_ROWS,
    tile_config,
    tile_configure,
    tile_load,
    tile_multiply,
    tile_store,
    tile_zero,
)
from kernels.cpu.compiled import compiled
from kernels.cpu.lanes import expect_load

BLOCK = 32  # of rows, of columns, and of K
CHUNK_ROWS = 256  # so many rows stay in a core's second cache while the weight goes by
STEP_BYTES = 2048  # of 32 columns, for 32 of K
ROW_BYTES = BLOCK * 2  # of a row's 32 of K
SUM_BYTES = BLOCK * 4  # of a row's sums by 32 columns
PIECE_STEPS = 8
LINE_BYTES = 64
STEP_LINES = STEP_BYTES // LINE_BYTES
MAX_AHEAD = 8  # of a step: with more, they stand in the way of what is needed now

# Configurations by the number of rows of a block, less one.
CONFIGS = np.stack(
    [tile_config(min(rows, TILE_ROWS), max(rows - TILE_ROWS, 1)) for rows in range(1, BLOCK + 1)]
)


class Rows(NamedTuple):
    """Rows of BF16 in blocks of 32, cut into steps of 32 columns: where they are, in bytes."""

    address: int
    row_bytes: int  # from row to row of a block
    step_bytes: int  # from step to step
    block_bytes: int  # from block to block


def num_blocks(weight: Any) -> Any:
    """Of 32 columns of the product; `weight` as `sum_products` takes it."""
    return len(weight) if isinstance(weight, np.ndarray) else len(weight.bases)


def num_steps(weight: Any) -> Any:
    """Of 32 of K."""
    raise NotImplementedError("compiled code only")


def sum_products(
    rows: Any, num_rows: int, weight: Any, block: int, configs: Any, sums_at: int
) -> None:
    """FP32 sums [num_rows, 32] of rows by a block of the weight's columns.

    `weight`: packed, an array [N / 32, K / 32, 16, 32, 2]; or see compressed_products.py.
    """
    raise NotImplementedError("compiled code only")


@overload(num_blocks, strict=False)
def _num_blocks(weight: Any) -> Any:
    return (lambda weight: weight.shape[0]) if isinstance(weight, types.Array) else None


@overload(num_steps, strict=False)
def _num_steps(weight: Any) -> Any:
    return (lambda weight: weight.shape[1]) if isinstance(weight, types.Array) else None


@overload(sum_products, strict=False)
def _sum_products(
    rows: Any, num_rows: Any, weight: Any, block: Any, configs: Any, sums_at: Any
) -> Any:
    if not isinstance(weight, types.Array):
        return None
    return lambda rows, num_rows, weight, block, configs, sums_at: _sum(
        rows, num_rows, weight, block, configs, sums_at
    )


@compiled()
def _sum(rows: Any, num_rows: int, weight: Any, block: int, configs: Any, sums_at: int) -> None:
    """Where there are more rows than one block has, K is cut so that a piece of the weight stays in
    the first cache while they go by, and the next piece is fetched meanwhile.
    """
    all_steps = weight.shape[1]
    num_row_blocks = (num_rows + BLOCK - 1) // BLOCK
    num_pieces = (all_steps + PIECE_STEPS - 1) // PIECE_STEPS if num_row_blocks > 1 else 1
    # A single block of rows waits for memory in any case, which fetches in its own order best.
    num_ahead = min(STEP_LINES // num_row_blocks, MAX_AHEAD) if num_row_blocks > 1 else 0
    configured = 0
    for piece in range(num_pieces):
        step = all_steps * piece // num_pieces
        piece_steps = all_steps * (piece + 1) // num_pieces - step
        columns_at = weight.ctypes.data + (block * all_steps + step) * STEP_BYTES
        ahead_at = columns_at + piece_steps * STEP_BYTES
        for index in range(num_row_blocks):
            block_rows = min(BLOCK, num_rows - index * BLOCK)
            if block_rows != configured:
                tile_configure(configs[block_rows - 1].ctypes.data)
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


@compiled()
def plain_rows(address: int, num_columns: int) -> Any:
    """[T, K]."""
    return Rows(address, num_columns * 2, ROW_BYTES, num_columns * 2 * BLOCK)


@compiled()
def tiled_rows(address: int, num_columns: int) -> Any:
    """[T / 32, K / 32, 32, 32]: as tiles are loaded, one step behind the other."""
    return Rows(address, ROW_BYTES, STEP_BYTES, num_columns * ROW_BYTES)


@compiled()
def padded(num_rows: int) -> Any:
    """To whole blocks."""
    return (num_rows + BLOCK - 1) // BLOCK * BLOCK


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
        multiply_step(
            rows_at + step * step_bytes, row_bytes, columns_at + step * STEP_BYTES, is_tall
        )
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
