"""GEMMs of rows with a packed weight, a block of 32 columns at a time, summed in FP32.

`num_blocks`, `num_steps`, `open_block` and `sum_steps` have one overload for each form of a weight,
which `add_form` makes:

    amx_gemm           BF16 on AMX tiles
    avx512_bf16_gemm   BF16 on AVX-512, without AMX
    compressed_gemm    BF16 that is decoded for either of the two
    quantized_gemm     4 or 8 bits that are decoded for either of the two
    avx512_fp32_gemm   FP32 on AVX-512

Each sums a block over steps of K in one order: a row's bits depend neither on the other rows nor on
the number of threads. (oneDNN cuts K by the number of rows.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from kernels.cpu.compile import compiled
from kernels.cpu.simd.amx_tiles import TILE_BYTES
from kernels.cpu.simd.f32x32 import load_floats, store_floats

BLOCK = 32  # rows, columns, and elements of K
SUM_BYTES = BLOCK * 4  # a row's sums by 32 columns
LEVELS = 4  # sums that eight lanes keep at a time
# Rows that stay in a core's L2 cache while the weight is streamed. FP32 computes twelve at a time.
HALF_CHUNK_ROWS = 256
FLOAT_CHUNK_ROWS = 96


class Rows(NamedTuple):
    """Rows in blocks of 32, cut into steps of 32 columns: their address and strides in bytes."""

    address: int
    row_bytes: int  # distance of rows of a block
    step_bytes: int  # distance of steps
    block_bytes: int  # distance of blocks


def num_blocks(weight: Any) -> Any:
    """The number of blocks of 32 columns of the GEMM; `weight` as for `sum_steps`."""
    return len(weight if isinstance(weight, np.ndarray) else weight[0])


def num_steps(weight: Any) -> Any:
    """The number of steps of 32 elements of K."""
    raise NotImplementedError("compiled code only")


def open_block(weight: Any, block: int) -> Any:
    """Returns what `sum_steps` needs besides the weight, for the steps of one block of columns."""
    raise NotImplementedError("compiled code only")


def sum_steps(
    rows: Any,
    num_rows: int,
    weight: Any,
    block: int,
    opened: Any,
    first: int,
    end: int,
    cursor: int,
    sums_at: int,
) -> int:
    """FP32 sums [num_rows, 32] of rows by a block of the weight's columns, over steps [first, end)
    of K; zeros if there are none.

    Steps of a block are summed in order: `cursor` is 0 for the first ones, then the result of the
    call before.
    """
    raise NotImplementedError("compiled code only")


def add_form(
    is_form: Callable[[Any], bool],
    sums: Callable[..., int],
    *,
    blocks: Callable[[Any], int],
    steps: Callable[[Any], int],
    opened: Callable[[Any, int], Any] = lambda weight, block: block,
) -> None:
    """Adds a form of a weight, told by its numba type. `sums` is a compiled function; the others
    are compiled into their callers.
    """

    @overload(num_blocks, strict=False)
    def _num_blocks(weight: Any) -> Any:
        return blocks if is_form(weight) else None

    @overload(num_steps, strict=False)
    def _num_steps(weight: Any) -> Any:
        return steps if is_form(weight) else None

    @overload(open_block, strict=False)
    def _open_block(weight: Any, block: Any) -> Any:
        return opened if is_form(weight) else None

    @overload(sum_steps, strict=False)
    def _sum_steps(
        rows: Any,
        num_rows: Any,
        weight: Any,
        block: Any,
        opened: Any,
        first: Any,
        end: Any,
        cursor: Any,
        sums_at: Any,
    ) -> Any:
        if not is_form(weight):
            return None
        return lambda rows, num_rows, weight, block, opened, first, end, cursor, sums_at: sums(
            rows, num_rows, weight, block, opened, first, end, cursor, sums_at
        )


def is_packed(num_dims: int) -> Callable[[Any], bool]:
    """Returns whether a numba type is that of a dense packed weight with so many dimensions."""
    return lambda weight: isinstance(weight, types.Array) and weight.ndim == num_dims


def is_whole(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether a weight [N, K] has this dtype, full blocks, and is in host memory."""
    return (
        weight.is_cpu and weight.dtype == dtype and all(size % BLOCK == 0 for size in weight.shape)
    )


@compiled()
def sum_products(rows: Any, num_rows: int, weight: Any, block: int, sums_at: int) -> None:
    """Runs `sum_steps` over all of K."""
    opened = open_block(weight, block)
    sum_steps(rows, num_rows, weight, block, opened, 0, num_steps(weight), 0, sums_at)


@compiled()
def sum_lanes(
    rows: Any,
    num_rows: int,
    weight: Any,
    block: int,
    opened: Any,
    borders: Any,
    first: int,
    end: int,
    cursor: int,
    sums_at: int,
) -> int:
    """The sum of an aligned subtree of lanes, [first, end), at `sums_at`: FP32 [num_rows, 32].

    `borders` [L + 1] are steps. Sums that wait for their sibling lie behind, so the memory has room
    for LEVELS sums. Returns the next cursor.
    """
    level_bytes, depth = padded(num_rows) * SUM_BYTES, 0
    for lane in range(first, end):
        at = sums_at + depth * level_bytes
        cursor = sum_steps(
            rows, num_rows, weight, block, opened, borders[lane], borders[lane + 1], cursor, at
        )
        done = lane - first + 1
        while done % 2 == 0:
            add_sums(sums_at + (depth - 1) * level_bytes, sums_at + depth * level_bytes, num_rows)
            depth -= 1
            done //= 2
        depth += 1
    return cursor


@compiled()
def add_sums(sums_at: int, others_at: int, num_rows: int) -> None:
    """sums [num_rows, 32] += others"""
    for at in range(0, num_rows * SUM_BYTES, SUM_BYTES):
        store_floats(load_floats(sums_at + at) + load_floats(others_at + at), sums_at + at)


@compiled()
def plain_rows(address: int, num_columns: int, itemsize: int) -> Any:
    """Rows of a dense [T, K]."""
    row_bytes = num_columns * itemsize
    return Rows(address, row_bytes, BLOCK * itemsize, row_bytes * BLOCK)


@compiled()
def work_rows(address: int, num_columns: int, itemsize: int) -> Any:
    """Rows in the layout that GEMMs read fastest, in `work_bytes` of memory.

    BF16: [T / 32, K / 32, 32, 32], as tiles are loaded, one step after the other. FP32: row-major
    with one extra cache line per row: rows of 4 KB would all map to the same lines of the L1 cache.
    """
    if itemsize == 2:
        return Rows(address, BLOCK * 2, BLOCK * BLOCK * 2, num_columns * BLOCK * 2)
    row_bytes = num_columns * itemsize + TILE_BYTES
    return Rows(address, row_bytes, BLOCK * itemsize, row_bytes * BLOCK)


@compiled()
def work_bytes(num_rows: int, num_columns: int, itemsize: int) -> int:
    return padded(num_rows) * (num_columns * itemsize + TILE_BYTES)


@compiled(is_inlined=True)
def row_at(rows: Any, row: int) -> Any:
    return rows.address + row // BLOCK * rows.block_bytes + row % BLOCK * rows.row_bytes


@compiled()
def chunk_rows(itemsize: int) -> int:
    return HALF_CHUNK_ROWS if itemsize == 2 else FLOAT_CHUNK_ROWS


@compiled()
def padded(num_rows: int) -> Any:
    """Rounds up to full blocks."""
    return (num_rows + BLOCK - 1) // BLOCK * BLOCK
