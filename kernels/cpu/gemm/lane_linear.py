"""y = x · weightᵀ + bias, summed over K in lanes; the formula is in `kernels/sum_lanes.py`.

Weights that are packed for this package's GEMMs are summed by `sum_lanes`. For others the
library computes each lane in FP32: of an FP32 weight the lanes are packed once (`LibraryLanes`); of
a BF16 or FP16 weight a part of its rows is widened for each GEMM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from kernels.cpu.compile import compiled
from kernels.cpu.gemm.avx512_fp32_gemm import can_pack_floats
from kernels.cpu.gemm.bf16_gemm import can_pack_bf16
from kernels.cpu.gemm.compressed_weight import CompressedWeight
from kernels.cpu.gemm.decompress_rows import decode_strips
from kernels.cpu.gemm.gemm_common import (
    BLOCK,
    LEVELS,
    SUM_BYTES,
    chunk_rows,
    num_blocks,
    open_block,
    plain_rows,
    sum_lanes,
)
from kernels.cpu.gemm.linear import is_packed, library_linear, pack_for_library, pack_weight
from kernels.cpu.gemm.packed_linear import for_gemm
from kernels.cpu.gemm.row_pieces import row_pieces
from kernels.cpu.simd.amx_tiles import aligned
from kernels.cpu.simd.dtype_convert import rounded_as, store_numbers
from kernels.cpu.simd.f32x32 import load_floats
from kernels.cpu.simd.intrinsics import array
from kernels.cpu.simd.tasks import num_tasks
from kernels.quantized_weight import QuantizedWeight
from kernels.sum_lanes import SumLanes, add_lanes


@dataclass(frozen=True)
class LibraryLanes:
    """An FP32 weight [N, K], each lane packed for the library; None for an empty one."""

    shape: tuple[int, int]
    parts: tuple[Tensor | None, ...]

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]


# Quantized weights only in the forms that the compiled loops decode: see quantized_linear.py.
LaneWeight = Tensor | LibraryLanes | CompressedWeight | QuantizedWeight


def is_blocked(lanes: SumLanes) -> bool:
    """Whether the lanes of all ranks consist of full steps of the compiled loops."""
    return lanes.alignment % BLOCK == 0


def pack_lanes(weight: Tensor, lanes: SumLanes, *, has_kernels: bool) -> Tensor | LibraryLanes:
    """weight [N, K] -> the form that `lane_linear` multiplies with; unchanged if packed already."""
    if is_packed(weight):
        return weight
    if is_blocked(lanes) and has_kernels and (can_pack_bf16(weight) or can_pack_floats(weight)):
        return pack_weight(weight)
    if weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return weight
    parts = [weight[:, first:end] if end > first else None for first, end in lanes.ranges]
    packed_parts = [None if part is None else pack_for_library(part) for part in parts]
    return LibraryLanes((len(weight), weight.shape[1]), tuple(packed_parts))


def lane_linear(
    x: Tensor, weight: LaneWeight, bias: Tensor | None = None, *, lanes: SumLanes
) -> Tensor:
    """Computes kernels.reference.lane_linear; `weight` may also be packed or compressed."""
    lanes.check(x.shape[1], 1)
    packed = _packed(weight, lanes)
    if packed is None:
        y = library_sums(x, weight, lanes, 1)[0].to(x.dtype)
    else:
        y = x.new_empty(len(x), num_blocks(packed) * BLOCK)
        _multiply(x, packed, lanes, y[None])
    return y if bias is None else y.add_(bias)


def lane_sums(x: Tensor, weight: LaneWeight, *, lanes: SumLanes, num_sums: int = 1) -> Tensor:
    """Computes kernels.reference.lane_sums."""
    lanes.check(x.shape[1], num_sums)
    packed = _packed(weight, lanes)
    if packed is None:
        return library_sums(x, weight, lanes, num_sums)
    shape = num_sums, len(x), num_blocks(packed) * BLOCK
    sums = torch.empty(shape, dtype=torch.float32)
    _multiply(x, packed, lanes, sums)
    return sums


def _packed(weight: LaneWeight, lanes: SumLanes) -> Any:
    """The weight as `sum_steps` takes it; None if the library multiplies."""
    if isinstance(weight, LibraryLanes) or not is_blocked(lanes):
        return None
    return for_gemm(weight)


def _multiply(x: Tensor, packed: Any, lanes: SumLanes, sums: Tensor) -> None:
    """Fills `sums` [num_sums, T, N], rounded once if they are not FP32."""
    tasks = num_tasks(num_blocks(packed))
    _multiply_lanes(array(x.contiguous()), packed, lane_steps(lanes), tasks, array(sums))


@cache
def lane_steps(lanes: SumLanes) -> Any:
    """The borders as steps of 32 columns: [L + 1] int64."""
    return np.array(lanes.borders, np.int64) // BLOCK


@compiled(parallel=True)
def _multiply_lanes(x: Any, weight: Any, borders: Any, num_tasks: int, sums: Any) -> None:
    total, most_rows = num_blocks(weight), chunk_rows(x.itemsize)
    for task in prange(num_tasks):
        first, end = total * task // num_tasks, total * (task + 1) // num_tasks
        memory = aligned(LEVELS * most_rows * SUM_BYTES)
        for low in range(0, len(x), most_rows):
            num_rows = min(most_rows, len(x) - low)
            rows = plain_rows(x[low:].ctypes.data, x.shape[1], x.itemsize)
            multiply_lanes(
                rows, num_rows, weight, borders, first, end, memory, sums[:, low:], sums.dtype
            )


@compiled()
def multiply_lanes(
    rows: Any,
    num_rows: int,
    weight: Any,
    borders: Any,
    first: int,
    end: int,
    memory: Any,
    sums: Any,
    dtype: Any,
) -> None:
    """sums [num_sums, T, N] of subtrees, rounded to `dtype`, by blocks [first, end) of columns.

    `memory`: LEVELS sums of the rows.
    """
    row_bytes, memory_at = sums.strides[1], memory.ctypes.data
    width = (len(borders) - 1) // len(sums)  # lanes of a subtree
    for block in range(first, end):
        opened, cursor = open_block(weight, block), 0
        for index in range(len(sums)):
            lane = index * width
            cursor = sum_lanes(
                rows,
                num_rows,
                weight,
                block,
                opened,
                borders,
                lane,
                lane + width,
                cursor,
                memory_at,
            )
            at = sums.ctypes.data + index * sums.strides[0] + block * BLOCK * sums.itemsize
            for row in range(num_rows):
                sums_of_row = rounded_as(load_floats(memory_at + row * SUM_BYTES), dtype)
                store_numbers(sums_of_row, at + row * row_bytes, sums.dtype, BLOCK)


def library_sums(x: Tensor, weight: LaneWeight, lanes: SumLanes, num_sums: int) -> Tensor:
    """FP32 [num_sums, T, N]"""
    rows = x.float()
    if isinstance(weight, LibraryLanes):
        return add_lanes(_lane_gemms(rows, weight.parts, lanes, weight.shape[0]), num_sums)
    sums = x.new_empty((num_sums, len(x), weight.shape[0]), dtype=torch.float32)
    assert not isinstance(weight, QuantizedWeight)
    for low, high, dense in _dense_pieces(weight):
        parts = [
            pack_for_library(dense[:, first:end].float()) if end > first else None
            for first, end in lanes.ranges
        ]
        sums[:, :, low:high] = add_lanes(_lane_gemms(rows, parts, lanes, high - low), num_sums)
    return sums


def _lane_gemms(rows: Tensor, parts: Any, lanes: SumLanes, num_columns: int) -> Tensor:
    sums = rows.new_zeros((lanes.num, len(rows), num_columns))
    for lane, ((first, end), part) in enumerate(zip(lanes.ranges, parts, strict=True)):
        if part is not None:
            sums[lane] = library_linear(rows[:, first:end].contiguous(), part)
    return sums


def _dense_pieces(weight: Tensor | CompressedWeight) -> Iterator[tuple[int, int, Tensor]]:
    """Rows [low, high) of a weight, and their dense values: the same pieces for both forms."""
    num_rows, width = weight.shape
    scratch: Tensor | None = None
    for first, end in row_pieces(num_rows):
        low, high = first * BLOCK, min(end * BLOCK, num_rows)
        if isinstance(weight, Tensor):
            yield low, high, weight[low:high]
            continue
        if scratch is None or len(scratch) < (end - first) * BLOCK:
            scratch = torch.empty((end - first) * BLOCK, width, dtype=torch.bfloat16)
        decode_strips(weight, first, end, scratch)
        yield low, high, scratch[: high - low]
