"""A lossless BF16 weight [N, K] in about 11.4 bits per element (see bf16_codec.py).

It is cut into blocks of 32 x 32; the blocks of 32 rows, over all of K, are a *strip* and share a
stream of verbatim bytes. A block's words are in the order that the GEMM needs: "tiles" is that
of a packed weight (`pack_bf16`), "rows" that of the weight. Each row of N has the base that gives
the fewest verbatim bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numba import prange
from torch import Tensor

from kernels.cpu.codec.bf16_codec import (
    BLOCK,
    LANE_OF,
    LANES,
    NUM_GROUPS,
    RECORD_BYTES,
    VERBATIM,
    VERBATIM_READ,
    WINDOW,
    encode_block,
)
from kernels.cpu.compile import compiled
from kernels.cpu.gemm.bf16_gemm import can_pack_bf16
from kernels.cpu.simd.amx_tiles import aligned
from kernels.cpu.simd.intrinsics import SIDE, array, transpose_words

WeightLayout = Literal["tiles", "rows"]
ALIGNMENT = 64
_NUM_BASES = 128 - WINDOW + 1
_NUM_TABLES = 4  # counters per row: its words are so similar that updates of one table would stall

# The row of a block whose base a lane uses, by group.
ROW_OF_LANE: dict[WeightLayout, Any] = {
    "tiles": np.empty((1, LANES), np.int64),
    "rows": np.empty((NUM_GROUPS, LANES), np.int64),
}
for _row in range(2):
    ROW_OF_LANE["tiles"][0, LANE_OF[_row]] = 16 * _row + np.arange(BLOCK) // 2
    ROW_OF_LANE["rows"][:, LANE_OF[_row]] = 2 * np.arange(NUM_GROUPS)[:, None] + _row


class Planes(NamedTuple):
    """N and K are rounded up to full blocks."""

    records: Any  # [N / 32, K / 32, RECORD_BYTES]
    bases: Any  # [N / 32, 32]
    starts: Any  # [N / 32 + 1] int64: the start of each strip in `verbatim`
    verbatim: Any  # [num_verbatim + VERBATIM_READ]


@dataclass(frozen=True)
class CompressedWeight:
    """A compressed weight. `memory` [num_bytes] uint8 holds all planes, each aligned to
    64 bytes.
    """

    shape: tuple[int, int]  # N, K
    order: WeightLayout
    num_verbatim: int
    memory: Tensor

    @cached_property
    def planes(self) -> Planes:
        shapes, offsets = _plan(self.shape, self.num_verbatim)
        parts = [
            array(self.memory[offset : offset + prod(shape)]).reshape(shape)
            for shape, offset in zip(shapes, offsets, strict=False)
        ]
        records, bases, starts, verbatim = parts
        return Planes(records, bases, starts.view(np.int64), verbatim)

    @property
    def num_bytes(self) -> int:
        return self.memory.numel()

    def numel(self) -> int:
        return prod(self.shape)


def _plan(shape: tuple[int, int], num_verbatim: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """The planes' shapes in bytes; the start of each plane, and the end of the last one."""
    num_strips, depth = (-(-size // BLOCK) for size in shape)
    shapes: list[tuple[int, ...]] = [
        (num_strips, depth, RECORD_BYTES),
        (num_strips, BLOCK),
        (8 * (num_strips + 1),),
        (num_verbatim + VERBATIM_READ,),
    ]
    offsets = [0]
    for each in shapes:
        offsets.append(offsets[-1] + -(-prod(each) // ALIGNMENT) * ALIGNMENT)
    return shapes, offsets


def memory_bytes(shape: tuple[int, int], num_verbatim: int) -> int:
    return _plan(shape, num_verbatim)[1][-1]


def compress_weight(weight: Tensor) -> CompressedWeight | None:
    """weight [N, K] -> its compressed form; None if not smaller, or not BF16 on a CPU."""
    if weight.dtype != torch.bfloat16 or not weight.is_cpu or not weight.numel():
        return None
    order: WeightLayout = "tiles" if can_pack_bf16(weight) else "rows"
    num_rows, width = weight.shape
    num_strips = -(-num_rows // BLOCK)
    words = array(weight.contiguous())
    bases, starts = np.zeros((num_strips, BLOCK), np.uint8), np.zeros(num_strips + 1, np.int64)
    _choose_bases(words, bases, starts)
    np.cumsum(starts, out=starts)
    shape, num_verbatim = (num_rows, width), int(starts[-1])
    num_bytes = memory_bytes(shape, num_verbatim)
    if num_bytes >= 2 * weight.numel():
        return None
    found = CompressedWeight(shape, order, num_verbatim, torch.zeros(num_bytes, dtype=torch.uint8))
    found.planes.bases[:], found.planes.starts[:] = bases, starts
    _encode(_whole_blocks(words, bases), order == "tiles", ROW_OF_LANE[order], found.planes)
    return found


def _whole_blocks(words: Any, bases: Any) -> Any:
    """Pads rows and columns to full blocks with words that need no verbatim byte."""
    num_rows, width = words.shape
    if num_rows % BLOCK == width % BLOCK == 0:
        return words
    whole = np.empty((bases.size, -(-width // BLOCK) * BLOCK), np.uint16)
    whole[:] = bases.reshape(-1, 1).astype(np.uint16) << 8
    whole[:num_rows, :width] = words
    return whole


@compiled(parallel=True)
def _choose_bases(words: Any, bases: Any, counts: Any) -> None:
    """Chooses each row's base. Stores each strip's number of verbatim bytes in `counts` [1:]."""
    num_rows, width = words.shape
    for strip in prange(len(bases)):
        found = np.empty((_NUM_TABLES, 256), np.int64)
        num_verbatim = 0
        for row in range(strip * BLOCK, min((strip + 1) * BLOCK, num_rows)):
            found[:] = 0
            for column in range(width):
                found[column % _NUM_TABLES, words[row, column] >> np.uint16(8)] += 1
            most = -1
            for base in range(_NUM_BASES):
                num_coded = 0
                for table in range(_NUM_TABLES):
                    for above in range(WINDOW):
                        num_coded += found[table, base + above]
                        if above > 0:
                            num_coded += found[table, VERBATIM + base + above]
                if num_coded > most:
                    most = num_coded
                    bases[strip, row - strip * BLOCK] = base
            num_verbatim += width - most
        counts[strip + 1] = num_verbatim


@compiled(parallel=True)
def _encode(words: Any, is_tiled: bool, row_of_lane: Any, planes: Any) -> None:
    num_strips, depth, _ = planes.records.shape
    row_bytes = words.shape[1] * 2
    for strip in prange(num_strips):
        lanes = spread_bases(planes.bases, strip, row_of_lane)
        tile = aligned(BLOCK * BLOCK * 2)
        verbatim_at = planes.verbatim.ctypes.data + planes.starts[strip]
        for step in range(depth):
            record_at = planes.records.ctypes.data + (strip * depth + step) * RECORD_BYTES
            rows_at = words.ctypes.data + strip * BLOCK * row_bytes + step * BLOCK * 2
            lanes_at, tile_at = lanes.ctypes.data, tile.ctypes.data
            if is_tiled:
                transpose_words(rows_at, row_bytes, tile_at, 128)
                transpose_words(rows_at + SIDE * row_bytes, row_bytes, tile_at + 64, 128)
                verbatim_at = encode_block(tile_at, 64, lanes_at, 0, record_at, verbatim_at)
            else:
                verbatim_at = encode_block(
                    rows_at, row_bytes, lanes_at, LANES, record_at, verbatim_at
                )


@compiled()
def spread_bases(bases: Any, strip: int, row_of_lane: Any) -> Any:
    """Bases for `decode_block`: [1, LANES], or [16, LANES] for blocks in row order."""
    lanes = np.empty(row_of_lane.shape, np.uint8)
    for group in range(lanes.shape[0]):
        for lane in range(LANES):
            lanes[group, lane] = bases[strip, row_of_lane[group, lane]]
    return lanes
