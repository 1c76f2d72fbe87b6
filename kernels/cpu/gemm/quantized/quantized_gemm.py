"""GEMMs with weights of four or eight bits: a part of a strip is decoded into a core's L1 cache,
multiplied by all rows and summed as the dense weight is, so the bits equal those of the dense one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload

from kernels.cpu.compile import compiled
from kernels.cpu.gemm.amx_gemm import (
    LINE_BYTES,
    PIECE_STEPS,
    STEP_BYTES,
    configure_for,
    multiply_block,
)
from kernels.cpu.gemm.avx512_bf16_gemm import multiply_piece
from kernels.cpu.gemm.gemm_common import BLOCK, SUM_BYTES, add_form
from kernels.cpu.gemm.quantized.decode_bytes import decode_e4m3, decode_int8
from kernels.cpu.gemm.quantized.decode_fp8 import MAGNITUDES, TABLE_BYTES, decode_fp8, fill_table
from kernels.cpu.gemm.quantized.decode_int4 import decode_int4
from kernels.cpu.gemm.quantized.planes import (
    FP8_STEPS,
    E4m3Planes,
    Fp8Planes,
    Int4Planes,
    Int8Planes,
    Planes,
)
from kernels.cpu.simd.amx_tiles import aligned, tile_release
from kernels.cpu.simd.cpu_features import has_amx, has_pair_products, target_features
from kernels.cpu.simd.intrinsics import array, expect_load
from kernels.quantized_weight import GroupedLayout, QuantizedWeight

AHEAD = 4  # tiles that are prefetched before they are decoded


def planes_for_gemm(weight: QuantizedWeight) -> Planes | None:
    """Returns the planes, or None if this CPU, or the compiled loops, cannot decode the weight."""
    has_whole_blocks = all(size % BLOCK == 0 for size in weight.shape)
    has_gemm = has_amx() or has_pair_products()
    if not (has_whole_blocks and has_gemm and weight.dtype == torch.bfloat16):
        return None
    planes = {name: array(plane) for name, plane in weight.planes.items()}
    layout = weight.layout
    if not isinstance(layout, GroupedLayout):
        is_decodable = layout.scale_rows == BLOCK and "avx512vbmi" in target_features()
        return Fp8Planes(**planes) if is_decodable else None
    if layout.group % BLOCK or layout.has_tiny_scales or layout.num_orders:
        return None
    group_steps = np.int64(layout.group // BLOCK)
    form = _GROUPED[layout.code]
    found: Planes = form(planes["codes"], planes["scales"], planes.get("zeros"), group_steps)
    return found


# The dtype of scales tells e2m1 from int4.
_GROUPED: dict[str, Any] = {
    "int4": Int4Planes,
    "e2m1": Int4Planes,
    "int8": Int8Planes,
    "e4m3": E4m3Planes,
}


def _class_of(weight: Any) -> Any:
    """The class of planes; None for any other form of a weight."""
    found = getattr(weight, "instance_class", None)
    return found if found in (Fp8Planes, *_GROUPED.values()) else None


@compiled()
def _sum(
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
    scratch_at = opened.ctypes.data
    for start in range(first, max(end, first + 1), PIECE_STEPS):
        piece_steps = min(PIECE_STEPS, end - start)
        for step in range(piece_steps):
            at = scratch_at + step * STEP_BYTES
            table_at = scratch_at + PIECE_STEPS * STEP_BYTES
            _decode_tile(weight, block, start + step, step == 0, table_at, at)
        _multiply(rows, num_rows, start, scratch_at, piece_steps, sums_at, start == first)
    return cursor


add_form(
    lambda weight: _class_of(weight) is not None,
    _sum,
    blocks=lambda weight: len(weight.codes),
    steps=lambda weight: weight.codes.shape[1],
    # memory for decoded tiles, and for a table
    opened=lambda weight, block: aligned(PIECE_STEPS * STEP_BYTES + TABLE_BYTES),
)


def _decode_tile(
    weight: Any, block: int, step: int, is_first: bool, table_at: int, out: int
) -> None:
    """Stores BF16 pairs [16, 32, 2]; `is_first`: the table is not that of the step before."""
    raise NotImplementedError("compiled code only")


@overload(_decode_tile, strict=False)
def _decode_tile_of(
    weight: Any, block: Any, step: Any, is_first: Any, table_at: Any, out: Any
) -> Any:
    form = _class_of(weight)
    if form is Fp8Planes:
        return _decode_fp8_tile
    if form is E4m3Planes:
        return _decode_e4m3_tile
    has_zeros = weight.types[2] != types.none
    if form is Int8Planes:
        return _decode_asymmetric_bytes if has_zeros else _decode_symmetric_bytes
    return _decode_asymmetric_tile if has_zeros else _decode_symmetric_tile


def _decode_fp8_tile(
    weight: Any, block: int, step: int, is_first: bool, table_at: int, out: int
) -> None:
    if is_first or step % FP8_STEPS == 0:
        fill_table(MAGNITUDES.ctypes.data, weight.scales[block, 0, step // FP8_STEPS], table_at)
    codes_at = weight.codes[block, step].ctypes.data
    for line in range(weight.codes.shape[2] // LINE_BYTES):
        expect_load(codes_at + AHEAD * weight.codes.shape[2] + line * LINE_BYTES)
    decode_fp8(codes_at, table_at, out)


def _decode_symmetric_tile(
    weight: Any, block: int, step: int, is_first: bool, table_at: int, out: int
) -> None:
    codes_at = weight.codes[block, step].ctypes.data
    for line in range(weight.codes.shape[2] // LINE_BYTES):
        expect_load(codes_at + AHEAD * weight.codes.shape[2] + line * LINE_BYTES)
    scales_at = weight.scales[block, step // weight.group_steps].ctypes.data
    decode_int4(codes_at, scales_at, weight.scales.dtype, None, out)


def _decode_asymmetric_tile(
    weight: Any, block: int, step: int, is_first: bool, table_at: int, out: int
) -> None:
    group = step // weight.group_steps
    codes_at = weight.codes[block, step].ctypes.data
    scales_at = weight.scales[block, group].ctypes.data
    zeros_at = np.int64(weight.zeros[block, group].ctypes.data)
    decode_int4(codes_at, scales_at, weight.scales.dtype, zeros_at, out)


def _decode_symmetric_bytes(
    weight: Any, block: int, step: int, is_first: bool, table_at: int, out: int
) -> None:
    codes_at = weight.codes[block, step].ctypes.data
    for line in range(weight.codes.shape[2] // LINE_BYTES):
        expect_load(codes_at + AHEAD * weight.codes.shape[2] + line * LINE_BYTES)
    scales_at = weight.scales[block, step // weight.group_steps].ctypes.data
    decode_int8(codes_at, scales_at, weight.scales.dtype, None, out)


def _decode_asymmetric_bytes(
    weight: Any, block: int, step: int, is_first: bool, table_at: int, out: int
) -> None:
    group = step // weight.group_steps
    codes_at = weight.codes[block, step].ctypes.data
    scales_at = weight.scales[block, group].ctypes.data
    zeros_at = np.int64(weight.zeros[block, group].ctypes.data)
    decode_int8(codes_at, scales_at, weight.scales.dtype, zeros_at, out)


def _decode_e4m3_tile(
    weight: Any, block: int, step: int, is_first: bool, table_at: int, out: int
) -> None:
    codes_at = weight.codes[block, step].ctypes.data
    for line in range(weight.codes.shape[2] // LINE_BYTES):
        expect_load(codes_at + AHEAD * weight.codes.shape[2] + line * LINE_BYTES)
    scales_at = weight.scales[block, step // weight.group_steps].ctypes.data
    decode_e4m3(codes_at, scales_at, weight.scales.dtype, out)


def _multiply(
    rows: Any,
    num_rows: int,
    step: int,
    columns_at: int,
    num_steps: int,
    sums_at: int,
    is_first: bool,
) -> None:
    """Computes `multiply_piece` with this CPU's GEMM."""
    raise NotImplementedError("compiled code only")


@overload(_multiply, strict=False)
def _multiply_here(
    rows: Any,
    num_rows: Any,
    step: Any,
    columns_at: Any,
    num_steps: Any,
    sums_at: Any,
    is_first: Any,
) -> Any:
    if has_amx():
        return lambda rows, num_rows, step, columns_at, num_steps, sums_at, is_first: (
            _multiply_on_tiles(rows, num_rows, step, columns_at, num_steps, sums_at, is_first)
        )
    return lambda rows, num_rows, step, columns_at, num_steps, sums_at, is_first: multiply_piece(
        rows, num_rows, step, columns_at, num_steps, sums_at, is_first
    )


@compiled()
def _multiply_on_tiles(
    rows: Any,
    num_rows: int,
    step: int,
    columns_at: int,
    num_steps: int,
    sums_at: int,
    is_first: bool,
) -> None:
    configured = 0
    for index in range((num_rows + BLOCK - 1) // BLOCK):
        block_rows = min(BLOCK, num_rows - index * BLOCK)
        if block_rows != configured:
            configure_for(block_rows)
            configured = block_rows
        multiply_block(
            rows.address + index * rows.block_bytes + step * rows.step_bytes,
            rows.row_bytes,
            columns_at,
            num_steps,
            block_rows,
            sums_at + index * BLOCK * SUM_BYTES,
            SUM_BYTES,
            is_first,
            0,
            0,
            rows.step_bytes,
        )
    tile_release()
