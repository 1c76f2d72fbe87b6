"""Dense rows of a compressed weight: strips of it, or the rows of an embedding lookup."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from kernels.cpu.codec.bf16_codec import BLOCK, LANES, decode_block
from kernels.cpu.compile import compiled
from kernels.cpu.gemm.compressed_weight import ROW_OF_LANE, CompressedWeight, spread_bases
from kernels.cpu.simd.amx_tiles import aligned
from kernels.cpu.simd.intrinsics import SIDE, array, transpose_words


def decode_strips(weight: CompressedWeight, first: int, end: int, out: Tensor) -> None:
    """Decodes the rows of strips [first, end) to `out` [32 · (end - first) or more, K]."""
    is_tiled, lanes = weight.order == "tiles", ROW_OF_LANE[weight.order]
    _decode_strips(weight.planes, is_tiled, lanes, first, end, array(out))


def select_rows(weight: CompressedWeight, row_ids: Tensor) -> Tensor:
    """weight.index_select(0, row_ids): [T] -> [T, K]. Decodes the strip of each row.

    Raises IndexError for a row id out of range.
    """
    num_rows, width = weight.shape
    if len(row_ids) and not 0 <= int(row_ids.min()) <= int(row_ids.max()) < num_rows:
        raise IndexError(f"row ids must be in [0, {num_rows})")
    out = torch.empty(len(row_ids), width, dtype=torch.bfloat16)
    is_tiled, lanes = weight.order == "tiles", ROW_OF_LANE[weight.order]
    _select_rows(weight.planes, is_tiled, lanes, array(row_ids), array(out))
    return out


@compiled(parallel=True)
def _decode_strips(
    planes: Any, is_tiled: bool, row_of_lane: Any, first: int, end: int, out: Any
) -> None:
    width = out.shape[1]
    for index in prange(end - first):
        strip, row = first + index, index * BLOCK
        lanes = spread_bases(planes.bases, strip, row_of_lane)
        scratch, block = aligned(BLOCK * BLOCK * 2), np.empty((BLOCK, BLOCK), np.uint16)
        verbatim_at = planes.verbatim.ctypes.data + planes.starts[strip]
        for step in range(planes.records.shape[1]):
            record_at = planes.records[strip, step].ctypes.data
            column = step * BLOCK
            is_whole = column + BLOCK <= width
            rows_at = np.int64(block.ctypes.data)
            if is_whole:
                rows_at = np.int64(out[row:, column:].ctypes.data)
            row_bytes = 2 * (width if is_whole else BLOCK)
            verbatim_at = _decode_rows(
                record_at, verbatim_at, lanes, is_tiled, rows_at, row_bytes, scratch
            )
            if not is_whole:
                out[row : row + BLOCK, column:] = block[:, : width - column]


@compiled(parallel=True)
def _select_rows(planes: Any, is_tiled: bool, row_of_lane: Any, row_ids: Any, out: Any) -> None:
    width = out.shape[1]
    for index in prange(len(row_ids)):
        strip, row = row_ids[index] // BLOCK, row_ids[index] % BLOCK
        lanes = spread_bases(planes.bases, strip, row_of_lane)
        scratch, block = aligned(BLOCK * BLOCK * 2), np.empty((BLOCK, BLOCK), np.uint16)
        verbatim_at = planes.verbatim.ctypes.data + planes.starts[strip]
        for step in range(planes.records.shape[1]):
            record_at = planes.records[strip, step].ctypes.data
            verbatim_at = _decode_rows(
                record_at, verbatim_at, lanes, is_tiled, block.ctypes.data, BLOCK * 2, scratch
            )
            column = step * BLOCK
            end = min(column + BLOCK, width)
            out[index, column:end] = block[row, : end - column]


@compiled()
def _decode_rows(
    record_at: int,
    verbatim_at: int,
    lanes: Any,
    is_tiled: bool,
    rows_at: int,
    row_bytes: int,
    scratch: Any,
) -> int:
    """Decodes a block to rows with stride `row_bytes`. Returns the next verbatim bytes' address."""
    lanes_at, tile_at = lanes.ctypes.data, scratch.ctypes.data
    if not is_tiled:
        return decode_block(record_at, verbatim_at, lanes_at, LANES, rows_at, row_bytes)
    verbatim_at = decode_block(record_at, verbatim_at, lanes_at, 0, tile_at, 64)
    transpose_words(tile_at, 128, rows_at, row_bytes)
    transpose_words(tile_at + 64, 128, rows_at + SIDE * row_bytes, row_bytes)
    return verbatim_at
