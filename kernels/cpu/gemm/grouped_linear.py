"""GEMMs of rows with the weights of experts; the formula is in kernels/reference.

The weights of all experts are one weight [E · N, K], packed like any other. The work is cut into
blocks of 32 columns of the experts that have rows: a step of few tokens reads only their weights.
Weights that are not packed for this package's GEMMs are multiplied by the library, expert by
expert.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from kernels.cpu.compile import compiled
from kernels.cpu.gemm.avx512_fp32_gemm import can_pack_floats
from kernels.cpu.gemm.bf16_gemm import can_pack_bf16
from kernels.cpu.gemm.gemm_common import (
    BLOCK,
    LEVELS,
    SUM_BYTES,
    chunk_rows,
    num_blocks,
    open_block,
    padded,
    plain_rows,
    sum_lanes,
)
from kernels.cpu.gemm.lane_linear import LaneWeight, is_blocked, lane_steps, library_sums
from kernels.cpu.gemm.linear import is_packed, library_linear, pack_weight
from kernels.cpu.gemm.packed_linear import for_gemm
from kernels.cpu.simd.amx_tiles import aligned
from kernels.cpu.simd.dtype_convert import rounded_as, store_numbers
from kernels.cpu.simd.f32x32 import load_floats
from kernels.cpu.simd.intrinsics import array
from kernels.cpu.simd.tasks import num_tasks
from kernels.sum_lanes import SumLanes


def pack_experts(weight: Tensor, *, has_kernels: bool) -> Tensor:
    """weight [E · N, K] -> the form that `grouped_linear` multiplies with, or unchanged."""
    is_packable = can_pack_bf16(weight) or can_pack_floats(weight)
    if is_packed(weight) or not (has_kernels and is_packable):
        return weight
    return pack_weight(weight)


def grouped_linear(
    x: Tensor, rows: Tensor | None, offsets: Tensor, weight: LaneWeight, *, lanes: SumLanes
) -> Tensor:
    """Computes kernels.reference.grouped_linear; `weight` may also be packed or compressed."""
    own = x if rows is None else x.index_select(0, rows)
    packed = _packed(weight, lanes)
    if packed is None:
        return _library_rows(own, offsets, weight, lanes)
    y = own.new_empty(1, len(own), num_blocks(packed) // (len(offsets) - 1) * BLOCK)
    _multiply(own, offsets, packed, lanes, y)
    return y[0]


def grouped_sums(
    x: Tensor,
    rows: Tensor | None,
    offsets: Tensor,
    weight: LaneWeight,
    *,
    lanes: SumLanes,
    num_sums: int = 1,
) -> Tensor:
    """Computes kernels.reference.grouped_sums."""
    lanes.check(x.shape[1], num_sums)
    own = x if rows is None else x.index_select(0, rows)
    packed = _packed(weight, lanes)
    if packed is None:
        return torch.cat(
            [
                library_sums(part, expert, lanes, num_sums)
                for part, expert in _groups(own, offsets, weight)
            ],
            dim=1,
        )
    num_columns = num_blocks(packed) // (len(offsets) - 1) * BLOCK
    sums = torch.empty((num_sums, len(own), num_columns), dtype=torch.float32)
    _multiply(own, offsets, packed, lanes, sums)
    return sums


def _packed(weight: LaneWeight, lanes: SumLanes) -> Any:
    return for_gemm(weight) if is_blocked(lanes) else None


def _library_rows(own: Tensor, offsets: Tensor, weight: LaneWeight, lanes: SumLanes) -> Tensor:
    def product(part: Tensor, expert: Tensor) -> Tensor:
        if lanes.num == 1:
            return library_linear(part, expert)
        return library_sums(part, expert, lanes, 1)[0].to(part.dtype)

    return torch.cat([product(*each) for each in _groups(own, offsets, weight)])


def _groups(own: Tensor, offsets: Tensor, weight: LaneWeight) -> list[tuple[Tensor, Tensor]]:
    """The rows and the weight of each expert that has rows."""
    assert isinstance(weight, Tensor)
    bounds = offsets.tolist()
    experts = weight.unflatten(0, (len(bounds) - 1, -1))
    return [
        (own[first:end], expert)
        for expert, first, end in zip(experts, bounds, bounds[1:], strict=False)
        if end > first
    ]


def _multiply(own: Tensor, offsets: Tensor, packed: Any, lanes: SumLanes, sums: Tensor) -> None:
    """Fills `sums` [num_sums, S, N], rounded once if they are not FP32."""
    most_experts = min(len(own), len(offsets) - 1)
    tasks = num_tasks(most_experts * (sums.shape[2] // BLOCK))
    operands = array(own.contiguous()), offsets.numpy(), packed, lane_steps(lanes)
    _multiply_experts(*operands, tasks, array(sums))


@compiled(parallel=True)
def _multiply_experts(
    x: Any, offsets: Any, weight: Any, borders: Any, num_tasks: int, sums: Any
) -> None:
    num_experts, most_rows = len(offsets) - 1, 1
    blocks, active, num_active = num_blocks(weight) // num_experts, np.empty_like(offsets), 0
    for expert in range(num_experts):
        num_rows = offsets[expert + 1] - offsets[expert]
        most_rows = max(most_rows, num_rows)
        if num_rows:
            active[num_active] = expert
            num_active += 1
    most_rows, total = min(padded(most_rows), chunk_rows(x.itemsize)), num_active * blocks
    for task in prange(num_tasks):
        at, end = total * task // num_tasks, total * (task + 1) // num_tasks
        memory = aligned(LEVELS * most_rows * SUM_BYTES)
        while at < end:
            expert, first = active[at // blocks], at % blocks
            last = min(first + end - at, blocks)
            for low in range(offsets[expert], offsets[expert + 1], most_rows):
                num_rows = min(most_rows, offsets[expert + 1] - low)
                rows = plain_rows(x[low:].ctypes.data, x.shape[1], x.itemsize)
                y = sums[:, low:]
                multiply_expert(
                    rows, num_rows, weight, expert * blocks, borders, first, last, memory, y
                )
            at += last - first


@compiled()
def multiply_expert(
    rows: Any,
    num_rows: int,
    weight: Any,
    base: int,
    borders: Any,
    first: int,
    end: int,
    memory: Any,
    sums: Any,
) -> None:
    """Computes `multiply_lanes` for the expert whose blocks of columns begin at `base`."""
    row_bytes, memory_at = sums.strides[1], memory.ctypes.data
    width = (len(borders) - 1) // len(sums)  # lanes of a subtree
    for block in range(first, end):
        opened, cursor = open_block(weight, base + block), 0
        for index in range(len(sums)):
            lane = index * width
            cursor = sum_lanes(
                rows,
                num_rows,
                weight,
                base + block,
                opened,
                borders,
                lane,
                lane + width,
                cursor,
                memory_at,
            )
            at = sums.ctypes.data + index * sums.strides[0] + block * BLOCK * sums.itemsize
            for row in range(num_rows):
                sums_of_row = rounded_as(load_floats(memory_at + row * SUM_BYTES), sums.dtype)
                store_numbers(sums_of_row, at + row * row_bytes, sums.dtype, BLOCK)
