"""GEMMs with a quantized weight: bit-identical to those with the dequantized one.

Where the compiled loops cannot decode it, a part of its rows is dequantized at a time, and
multiplied as a dense weight of these rows is.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.cpu.gemm.gemm_common import BLOCK
from kernels.cpu.gemm.lane_linear import is_blocked, lane_linear, lane_sums, pack_lanes
from kernels.cpu.gemm.linear import linear, pack_for_library, pack_weight
from kernels.cpu.gemm.packed_linear import for_gemm, packed_linear
from kernels.cpu.gemm.row_pieces import row_pieces
from kernels.quantized_weight import QuantizedWeight
from kernels.sum_lanes import SumLanes


def quantized_linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, *, has_kernels: bool
) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N] in the dtype of x."""
    planes = for_gemm(weight) if has_kernels else None
    if planes is not None:
        y = packed_linear(x, planes)
        return y if bias is None else y.add_(bias)
    pack = pack_weight if has_kernels else pack_for_library
    y = x.new_empty(len(x), weight.shape[0])
    for rows, dense in _pieces(weight):
        y[:, rows] = linear(x, pack(dense))
    return y if bias is None else y.add_(bias)


def quantized_lane_linear(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    *,
    lanes: SumLanes,
    has_kernels: bool,
) -> Tensor:
    """Computes `quantized_linear` with sums over K in lanes."""
    if has_kernels and _is_decoded(weight, lanes):
        return lane_linear(x, weight, bias, lanes=lanes)
    y = x.new_empty(len(x), weight.shape[0])
    for rows, dense in _pieces(weight):
        packed = pack_lanes(dense, lanes, has_kernels=has_kernels)
        y[:, rows] = lane_linear(x, packed, lanes=lanes)
    return y if bias is None else y.add_(bias)


def quantized_lane_sums(
    x: Tensor,
    weight: QuantizedWeight,
    *,
    lanes: SumLanes,
    num_sums: int = 1,
    has_kernels: bool,
) -> Tensor:
    """The FP32 sums of subtrees of the lanes: [num_sums, T, N]."""
    if has_kernels and _is_decoded(weight, lanes):
        return lane_sums(x, weight, lanes=lanes, num_sums=num_sums)
    sums = torch.empty((num_sums, len(x), weight.shape[0]), dtype=torch.float32)
    for rows, dense in _pieces(weight):
        packed = pack_lanes(dense, lanes, has_kernels=has_kernels)
        sums[:, :, rows] = lane_sums(x, packed, lanes=lanes, num_sums=num_sums)
    return sums


def _is_decoded(weight: QuantizedWeight, lanes: SumLanes) -> bool:
    """Whether the compiled loops decode it next to the GEMM."""
    return is_blocked(lanes) and for_gemm(weight) is not None


def _pieces(weight: QuantizedWeight) -> Iterator[tuple[slice, Tensor]]:
    """Rows of the weight, and their dense values."""
    for first, end in row_pieces(weight.shape[0]):
        dense = weight.strips(first, end)
        yield slice(first * BLOCK, first * BLOCK + len(dense)), dense
