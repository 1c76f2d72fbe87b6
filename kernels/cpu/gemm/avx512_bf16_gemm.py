"""BF16 GEMMs on AVX-512's dot products of pairs, for CPUs without AMX: eight rows by 32 columns
at a time, with the sums in registers.

An instruction adds two products to each of 16 sums, in FP32; subnormals count as 0. (Intel 64
Architectures Software Developer's Manual, volume 2, VDPBF16PS.)
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from kernels.cpu.compile import compiled
from kernels.cpu.gemm.gemm_common import BLOCK, SUM_BYTES, add_form, is_packed, is_whole
from kernels.cpu.simd.cpu_features import has_pair_products
from kernels.cpu.simd.intrinsics import Strided, in_groups

NUM_DIMS = 4  # dimensions of a packed weight
STEP_BYTES = 2048  # 32 columns, for 32 elements of K
PIECE_STEPS = 8  # this part of a block of columns stays in the L1 cache for all rows
MOST_ROWS = 8  # 16 sums in registers saturate the multipliers; more would only add code to compile
PAIRS = BLOCK // 2

_WORD, _ADDRESS = ir.IntType(32), ir.IntType(64)
_LANES = 16
_WORDS, _FLOATS = ir.VectorType(_WORD, _LANES), ir.VectorType(ir.FloatType(), _LANES)
# Halves of a row's sums, and of a row of columns: each fills a register
_HALVES = 0, SUM_BYTES // 2


def can_pack_pairs(weight: Tensor) -> bool:
    """Whether a weight [N, K] is in host memory with full BF16 blocks and a CPU with VDPBF16PS."""
    return is_whole(weight, torch.bfloat16) and has_pair_products()


def is_packed_pairs(weight: Tensor) -> bool:
    return weight.dim() == NUM_DIMS


def pack_pairs(weight: Tensor) -> Tensor:
    """weight [N, K] -> [N / 32, K / 2, 32, 2]: pairs along K are adjacent."""
    pairs = weight.view(len(weight) // BLOCK, BLOCK, -1, 2)
    return pairs.transpose(1, 2).contiguous()


@compiled()
def _sum(
    rows: Any,
    num_rows: int,
    weight: Any,
    block: int,
    opened: int,
    first: int,
    end: int,
    cursor: int,
    sums_at: int,
) -> int:
    block_at = weight.ctypes.data + block * (weight.shape[1] // PAIRS) * STEP_BYTES
    for step in range(first, max(end, first + 1), PIECE_STEPS):
        piece_steps = min(PIECE_STEPS, end - step)
        columns_at = block_at + step * STEP_BYTES
        multiply_piece(rows, num_rows, step, columns_at, piece_steps, sums_at, step == first)
    return cursor


add_form(
    is_packed(NUM_DIMS),
    _sum,
    blocks=lambda weight: weight.shape[0],
    steps=lambda weight: weight.shape[1] // PAIRS,
)


@compiled()
def multiply_piece(
    rows: Any,
    num_rows: int,
    step: int,
    columns_at: int,
    num_steps: int,
    sums_at: int,
    is_first: bool,
) -> None:
    """Adds the products of some steps of K to the sums [num_rows, 32]; `is_first` clears these.

    `columns_at`: the columns of these steps, [num_steps, 16, 32, 2].
    """
    for first in range(0, num_rows, BLOCK):
        rows_at = rows.address + first // BLOCK * rows.block_bytes + step * rows.step_bytes
        factors = rows_at, rows.row_bytes, rows.step_bytes
        block_rows = min(BLOCK, num_rows - first)
        at = sums_at + first * SUM_BYTES
        add_pairs(at, factors, columns_at, num_steps, block_rows, is_first)


@intrinsic
def add_pairs(
    _: Any, sums: Any, factors: Any, columns: Any, num_steps: Any, num_rows: Any, is_first: Any
) -> Any:
    """sums [num_rows, 32] += factors · columns [num_steps, 16, 32, 2]; `=` if `is_first`.

    `factors`: an address, and the strides in bytes between rows and between steps.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, factors, columns, num_steps, num_rows, is_first = args
        at, row_bytes, step_bytes = cgutils.unpack_tuple(builder, factors, 3)
        sums, factors = Strided(builder, sums, _ADDRESS(SUM_BYTES)), Strided(builder, at, row_bytes)

        def add(first: Any, count: int) -> None:
            group = _RowGroup(builder, sums.below(first), factors.below(first), count)
            group.load(is_first)
            with cgutils.for_range(builder, num_steps) as step:
                factors_at = builder.mul(step.index, step_bytes)
                columns_at = builder.add(columns, builder.mul(step.index, _ADDRESS(STEP_BYTES)))
                with cgutils.for_range(builder, _ADDRESS(PAIRS)) as pair:
                    offset = builder.add(factors_at, builder.mul(pair.index, _ADDRESS(4)))
                    group.add(offset, Strided(builder, columns_at, _ADDRESS(SUM_BYTES)), pair.index)
            group.store()

        in_groups(builder, num_rows, MOST_ROWS, add)
        return context.get_dummy_value()

    whole = types.int64
    places = whole, types.UniTuple(whole, 3), whole
    return types.void(*places, whole, whole, types.boolean), generate


class _RowGroup:
    """Rows of generated code whose sums are in registers."""

    def __init__(self, builder: Any, sums: Strided, factors: Strided, count: int) -> None:
        self._builder, self._factors = builder, factors
        self._rows = [_ADDRESS(index) for index in range(count)]
        self._places = [
            sums.place(row, _FLOATS, _ADDRESS(half)) for row in self._rows for half in _HALVES
        ]
        self._held = [cgutils.alloca_once(builder, _FLOATS) for _ in self._places]

    def load(self, is_first: Any) -> None:
        builder, zeros = self._builder, ir.Constant(_FLOATS, None)
        for place, held in zip(self._places, self._held, strict=True):
            begun = builder.select(is_first, zeros, builder.load(place, align=4))
            builder.store(begun, held)

    def add(self, offset: Any, columns: Strided, pair: Any) -> None:
        builder = self._builder
        halves = [
            builder.load(columns.place(pair, _WORDS, _ADDRESS(half)), align=4) for half in _HALVES
        ]
        for index, row in enumerate(self._rows):
            factor = _spread(
                builder, builder.load(self._factors.place(row, _WORD, offset), align=4)
            )
            for half, held in zip(halves, self._held[2 * index :], strict=False):
                builder.store(_multiply_add(builder, builder.load(held), factor, half), held)

    def store(self) -> None:
        for place, held in zip(self._places, self._held, strict=True):
            self._builder.store(self._builder.load(held), place, align=4)


def _spread(builder: Any, word: Any) -> Any:
    one = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), word, _WORD(0))
    return builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * _LANES))


def _multiply_add(builder: Any, sums: Any, factors: Any, columns: Any) -> Any:
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    operands = [sums, factors, columns]
    function = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(_FLOATS, [each.type for each in operands]), name
    )
    return builder.call(function, operands)
