"""GEMMs with a compressed weight; the counterpart of `amx_gemm` and `avx512_bf16_gemm`.

A block of the weight is decoded into a core's L1 cache just before it is multiplied, and summed in
the same order: the bits equal those of the dense weight.
"""

from __future__ import annotations

from typing import Any

from kernels.cpu.codec.bf16_codec import RECORD_BYTES, decode_block
from kernels.cpu.compile import compiled
from kernels.cpu.gemm.amx_gemm import (
    LINE_BYTES,
    PIECE_STEPS,
    STEP_BYTES,
    configure_for,
    load_sums,
    multiply_block,
    multiply_step,
    store_sums,
)
from kernels.cpu.gemm.avx512_bf16_gemm import multiply_piece
from kernels.cpu.gemm.compressed_weight import (
    ROW_OF_LANE,
    CompressedWeight,
    Planes,
    spread_bases,
)
from kernels.cpu.gemm.gemm_common import BLOCK, SUM_BYTES, add_form
from kernels.cpu.simd.amx_tiles import TILE_ROWS, aligned, tile_release
from kernels.cpu.simd.cpu_features import has_amx
from kernels.cpu.simd.intrinsics import expect_load

AHEAD = 4  # blocks that are prefetched before they are decoded
VERBATIM_AHEAD_BYTES = 256  # the part of the stream that AHEAD blocks read
RECORD_LINES = RECORD_BYTES // LINE_BYTES
MIN_OTHERS = 3  # blocks of rows: with fewer, each step would prefetch too much

_ROW_OF_LANE = ROW_OF_LANE["tiles"]


def planes_for_tiles(weight: CompressedWeight) -> Any:
    """The planes for `sum_products`; None if the order is not that of a packed weight."""
    return weight.planes if weight.order == "tiles" else None


def _opened(weight: Any, block: Any) -> Any:
    """The bases of a strip, and memory for its decoded blocks."""
    lanes = spread_bases(weight.bases, block, _ROW_OF_LANE)
    return lanes, aligned(PIECE_STEPS * STEP_BYTES)


def _is_planes(weight: Any) -> bool:
    return getattr(weight, "instance_class", None) is Planes


@compiled()
def _sum_by_pairs(
    rows: Any,
    num_rows: int,
    planes: Any,
    strip: int,
    opened: Any,
    first: int,
    end: int,
    cursor: int,
    sums_at: int,
) -> int:
    """FP32 sums [num_rows, 32] of rows by steps of a strip. Each part of a strip is decoded before
    all rows are multiplied by it. The cursor is the address of the next verbatim bytes.
    """
    lanes, scratch = opened
    verbatim_at = cursor if cursor else planes.verbatim.ctypes.data + planes.starts[strip]
    for start in range(first, max(end, first + 1), PIECE_STEPS):
        piece_steps = min(PIECE_STEPS, end - start)
        for step in range(piece_steps):
            record_at = planes.records[strip, start + step].ctypes.data
            for line in range(RECORD_LINES):
                expect_load(record_at + AHEAD * RECORD_BYTES + line * LINE_BYTES)
            expect_load(verbatim_at + VERBATIM_AHEAD_BYTES)
            tile_at = scratch.ctypes.data + step * STEP_BYTES
            verbatim_at = decode_block(record_at, verbatim_at, lanes.ctypes.data, 0, tile_at, 64)
        scratch_at = scratch.ctypes.data
        multiply_piece(rows, num_rows, start, scratch_at, piece_steps, sums_at, start == first)
    return verbatim_at


@compiled()
def _sum_on_tiles(
    rows: Any,
    num_rows: int,
    planes: Any,
    strip: int,
    opened: Any,
    first: int,
    end: int,
    cursor: int,
    sums_at: int,
) -> int:
    """FP32 sums [num_rows, 32] of rows by steps of a strip; the cursor as in `_sum_by_pairs`.

    Each part of it is decoded while the first 32 rows are multiplied by it, and stays in the L1
    cache for the other rows. For 32 rows or fewer, all steps are one part.
    """
    all_steps, strip_steps = end - first, planes.records.shape[1]
    num_row_blocks = (num_rows + BLOCK - 1) // BLOCK
    num_pieces = max((all_steps + PIECE_STEPS - 1) // PIECE_STEPS, 1) if num_row_blocks > 1 else 1
    lanes, scratch = opened
    verbatim_at = cursor if cursor else planes.verbatim.ctypes.data + planes.starts[strip]
    lanes_at, scratch_at, configured = lanes.ctypes.data, scratch.ctypes.data, 0
    # There is time to prefetch the next part during the GEMMs of many rows.
    num_others = num_row_blocks - 1
    num_ahead = (RECORD_LINES + num_others - 1) // num_others if num_others >= MIN_OTHERS else 0
    for piece in range(num_pieces):
        step = first + all_steps * piece // num_pieces
        piece_steps = first + all_steps * (piece + 1) // num_pieces - step
        record_at = planes.records.ctypes.data + (strip * strip_steps + step) * RECORD_BYTES
        ahead_at = record_at + piece_steps * RECORD_BYTES
        for index in range(num_row_blocks):
            block_rows = min(BLOCK, num_rows - index * BLOCK)
            if block_rows != configured:
                configure_for(block_rows)
                configured = block_rows
            rows_at = rows.address + index * rows.block_bytes + step * rows.step_bytes
            at = sums_at + index * BLOCK * SUM_BYTES
            if index == 0:
                is_tall = block_rows > TILE_ROWS
                load_sums(at, SUM_BYTES, is_tall, piece == 0)
                verbatim_at = _decode_and_multiply(
                    record_at,
                    verbatim_at,
                    lanes_at,
                    scratch_at,
                    piece_steps,
                    rows_at,
                    rows.row_bytes,
                    rows.step_bytes,
                    is_tall,
                    num_ahead == 0,
                )
                store_sums(at, SUM_BYTES, is_tall)
            else:
                multiply_block(
                    rows_at,
                    rows.row_bytes,
                    scratch_at,
                    piece_steps,
                    block_rows,
                    at,
                    SUM_BYTES,
                    piece == 0,
                    ahead_at,
                    num_ahead,
                    rows.step_bytes,
                )
                ahead_at += piece_steps * num_ahead * LINE_BYTES
    tile_release()
    return verbatim_at


@compiled()
def _decode_and_multiply(
    records_at: int,
    verbatim_at: int,
    lanes_at: int,
    scratch_at: int,
    num_steps: int,
    rows_at: int,
    row_bytes: int,
    step_bytes: int,
    is_tall: bool,
    fetches: bool,
) -> int:
    """Decodes each block while the one before it is multiplied; the last PIECE_STEPS blocks stay in
    the scratch. With `fetches`, blocks some steps ahead are prefetched.

    Returns the address of the next block's verbatim bytes.
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
            multiply_step(rows_at + (step - 1) * step_bytes, row_bytes, tile_at, is_tall)
    return verbatim_at


add_form(
    _is_planes,
    _sum_on_tiles if has_amx() else _sum_by_pairs,
    blocks=lambda weight: len(weight.bases),
    steps=lambda weight: weight.records.shape[1],
    opened=_opened,
)
