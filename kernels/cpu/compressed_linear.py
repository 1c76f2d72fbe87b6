"""y = x · weightᵀ + bias with a compressed weight: the bits that `linear` gives for the plain one.

On AMX a block of the weight is decoded into a core's first cache just before it is multiplied by,
in the order of `amx_linear`. Elsewhere a piece of the weight's rows is decoded, and the library
multiplies by it.
"""

from __future__ import annotations

from typing import Any

import numba
import torch
from numba import prange
from torch import Tensor

from kernels.cpu.amx import (
    TILE_ROWS,
    aligned,
    expect_store,
    round_to_bf16,
    tile_configure,
    tile_release,
)
from kernels.cpu.amx_products import (
    CHUNK_ROWS,
    CONFIGS,
    LINE_BYTES,
    PIECE_STEPS,
    STEP_BYTES,
    load_sums,
    multiply_block,
    multiply_step,
    store_sums,
)
from kernels.cpu.compiled import compiled
from kernels.cpu.compressed_weight import ROW_OF_LANE, CompressedWeight, spread_bases
from kernels.cpu.high_bytes import BLOCK, RECORD_BYTES, decode_block
from kernels.cpu.lanes import array, expect_load
from kernels.cpu.linear import linear
from kernels.cpu.plain_rows import decode_strips
from kernels.expect import expect

# The library splits K among threads where a product has few columns: a piece of a weight needs as
# many a thread for the bits of the whole (measured with 1 and 2 threads, K up to 14,336).
THREAD_ROWS = 128
MIN_PIECE_ROWS = 256
AHEAD = 4  # blocks that are fetched before they are decoded
VERBATIM_AHEAD_BYTES = 256  # what so many blocks take of the stream
RECORD_LINES = RECORD_BYTES // LINE_BYTES
MIN_OTHERS = 3  # blocks of rows: with less, too much would be fetched at each step


def compressed_linear(
    x: Tensor,
    weight: CompressedWeight,
    bias: Tensor | None = None,
    *,
    is_batch_invariant: bool = False,
) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N], all BF16. Rows do not depend on their number.

    Raises BadTensor.
    """
    expect("x", x, (None, weight.shape[1]), dtype=torch.bfloat16, device=weight.memory.device)
    if weight.order == "tiles":
        y = _on_amx(x, weight)
    else:
        y = _by_pieces(x, weight)
    return y if bias is None else y.add_(bias)


def _by_pieces(x: Tensor, weight: CompressedWeight) -> Tensor:
    num_rows, width = weight.shape
    num_strips = len(weight.planes.bases)
    piece_rows = max(THREAD_ROWS * torch.get_num_threads(), MIN_PIECE_ROWS)
    num_pieces = max(num_rows // piece_rows, 1)
    ends = [num_strips * (piece + 1) // num_pieces for piece in range(num_pieces)]
    largest = max(end - first for first, end in zip([0, *ends], ends, strict=False))
    scratch = x.new_empty(largest * BLOCK, width)
    y = x.new_empty(len(x), num_rows)
    for first, end in zip([0, *ends], ends, strict=False):
        low, high = first * BLOCK, min(end * BLOCK, num_rows)
        decode_strips(weight, first, end, scratch)
        y[:, low:high] = linear(x, scratch[: high - low])
    return y


def _on_amx(x: Tensor, weight: CompressedWeight) -> Tensor:
    y = x.new_empty(len(x), weight.shape[0])
    num_tasks = min(numba.get_num_threads(), len(weight.planes.bases))
    lanes = ROW_OF_LANE[weight.order]
    _linear(array(x.contiguous()), weight.planes, lanes, CONFIGS, num_tasks, array(y))
    return y


@compiled(parallel=True)
def _linear(x: Any, planes: Any, row_of_lane: Any, configs: Any, num_tasks: int, y: Any) -> None:
    num_rows, num_strips = x.shape[0], len(planes.bases)
    for task in prange(num_tasks):
        first, end = num_strips * task // num_tasks, num_strips * (task + 1) // num_tasks
        sums, scratch = aligned(CHUNK_ROWS * BLOCK * 4), aligned(PIECE_STEPS * STEP_BYTES)
        for low in range(0, num_rows, CHUNK_ROWS):
            high = min(low + CHUNK_ROWS, num_rows)
            for strip in range(first, end):
                lanes = spread_bases(planes.bases, strip, row_of_lane)
                _multiply_rows(x, planes, lanes, configs, low, high, strip, scratch, sums, y)
        tile_release()


@compiled()
def _multiply_rows(
    x: Any,
    planes: Any,
    lanes: Any,
    configs: Any,
    low: int,
    high: int,
    strip: int,
    scratch: Any,
    sums: Any,
    y: Any,
) -> None:
    """Rows [low, high) by a strip.

    A piece of it is decoded while the first 32 rows are multiplied by it, and stays in the first
    cache while the others go by. For 32 or less, all of it is one piece.
    """
    num_steps, row_bytes, y_bytes = planes.records.shape[1], x.shape[1] * 2, y.shape[1] * 2
    num_pieces = (num_steps + PIECE_STEPS - 1) // PIECE_STEPS if high - low > BLOCK else 1
    verbatim_at = planes.verbatim.ctypes.data + planes.starts[strip]
    lanes_at, scratch_at, num_configured = lanes.ctypes.data, scratch.ctypes.data, 0
    # Many rows leave time to fetch the next piece while they go by.
    num_others = (high - low - 1) // BLOCK
    num_ahead = (RECORD_LINES + num_others - 1) // num_others if num_others >= MIN_OTHERS else 0
    for piece in range(num_pieces):
        step = num_steps * piece // num_pieces
        piece_steps = num_steps * (piece + 1) // num_pieces - step
        record_at = planes.records.ctypes.data + (strip * num_steps + step) * RECORD_BYTES
        ahead_at = record_at + piece_steps * RECORD_BYTES
        for row in range(low, high, BLOCK):
            num_rows = min(BLOCK, high - row)
            if num_rows != num_configured:
                tile_configure(configs[num_rows - 1].ctypes.data)
                num_configured = num_rows
            x_at = x.ctypes.data + row * row_bytes + step * BLOCK * 2
            y_at = y.ctypes.data + row * y_bytes + strip * BLOCK * 2
            sums_at, is_tall = sums.ctypes.data + (row - low) * BLOCK * 4, num_rows > TILE_ROWS
            if piece == num_pieces - 1:
                for r in range(num_rows):
                    expect_store(y_at + r * y_bytes)
            if row == low:
                load_sums(sums_at, BLOCK * 4, is_tall, piece == 0)
                verbatim_at = _decode_and_multiply(
                    record_at,
                    verbatim_at,
                    lanes_at,
                    scratch_at,
                    piece_steps,
                    x_at,
                    row_bytes,
                    is_tall,
                    num_ahead == 0,
                )
                store_sums(sums_at, BLOCK * 4, is_tall)
            else:
                multiply_block(
                    x_at,
                    row_bytes,
                    scratch_at,
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
def _decode_and_multiply(
    records_at: int,
    verbatim_at: int,
    lanes_at: int,
    scratch_at: int,
    num_steps: int,
    rows_at: int,
    row_bytes: int,
    is_tall: bool,
    fetches: bool,
) -> int:
    """A block is decoded while the one before it is multiplied by; the last PIECE_STEPS of them
    stay in the scratch. With `fetches` those some steps ahead are fetched.

    Returns where the next block's verbatim bytes are.
    """
    for step in range(num_steps + 1):
        if step < num_steps:
            record_at = records_at + step * RECORD_BYTES
            if fetches:
                for line in range(RECORD_LINES):
                    expect_load(record_at + AHEAD * RECORD_BYTES + line * LINE_BYTES)
            expect_load(verbatim_at + VERBATIM_AHEAD_BYTES)
            tile_at = scratch_at + step % PIECE_STEPS * STEP_BYTES
            verbatim_at = decode_block(record_at, verbatim_at, lanes_at, 0, tile_at, 64)
        if step > 0:
            tile_at = scratch_at + (step - 1) % PIECE_STEPS * STEP_BYTES
            multiply_step(rows_at + (step - 1) * 64, row_bytes, tile_at, is_tall)
    return verbatim_at
