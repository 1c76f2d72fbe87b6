"""AMX's tile instructions, for compiled loops: eight tiles of up to 16 rows of 64 bytes each.

A literal number identifies a tile; addresses and strides are integers in bytes. `tile_multiply`
adds to FP32 [16, 16] the product of BF16 [16, 32] and BF16 [32, 16], whose rows are stored in
pairs: [16, 16, 2]. (Intel 64 Architectures Software Developer's Manual, volume 1, chapter 18.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from kernels.cpu.compile import compiled

TILE_ROWS = 16
TILE_BYTES = 64  # bytes of a row

_I8, _I16, _I32, _I64 = (ir.IntType(size) for size in (8, 16, 32, 64))
_POINTER = _I8.as_pointer()
_NUM_HALVES = 32


def tile_config(first_rows: int, second_rows: int) -> NDArray[np.uint8]:
    """The argument of `tile_configure`, [64]: two blocks of rows multiplied by two of columns.

    Tiles 0, 1 (sums) and 4 (factors) have `first_rows`, tiles 2, 3 and 5 `second_rows`; 6 and 7,
    the columns' factors, are full.
    """
    config = np.zeros(64, np.uint8)
    config[0] = 1  # the palette
    config[16:32].view(np.uint16)[:] = TILE_BYTES
    config[48:56] = [first_rows] * 2 + [second_rows] * 2 + [first_rows, second_rows] + [16] * 2
    return config


@compiled()
def aligned(num_bytes: int) -> Any:
    """New memory, [num_bytes], aligned to a cache line: each row of a tile fills a line."""
    memory = np.empty(num_bytes + TILE_BYTES, np.uint8)
    first = -memory.ctypes.data % TILE_BYTES
    return memory[first : first + num_bytes]


def _call(builder: Any, name: str, *operands: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    builder.call(function, operands)


def bf16_of_floats(builder: Any, lower: Any, upper: Any) -> Any:
    """Two vectors of 16 FP32 -> one of 32 BF16, to nearest even; subnormals become 0."""
    halves = ir.VectorType(_I16, _NUM_HALVES)
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    function = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(halves, [upper.type, lower.type]), name
    )
    return builder.call(function, [upper, lower])


def _tile(literal: Any) -> Any:
    return ir.Constant(_I8, literal.literal_value)


@intrinsic
def tile_configure(_: Any, config: Any) -> Any:
    """Configures the tiles of the calling thread; each thread does this separately."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "llvm.x86.ldtilecfg", builder.inttoptr(args[0], _POINTER))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def tile_release(_: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "llvm.x86.tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic(prefer_literal=True)
def tile_zero(_: Any, tile: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "llvm.x86.tilezero", _tile(tile))
        return context.get_dummy_value()

    return types.void(tile), generate


def _moving(name: str) -> Any:
    def move(_: Any, tile: Any, address: Any, stride: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _call(builder, name, _tile(tile), builder.inttoptr(args[1], _POINTER), args[2])
            return context.get_dummy_value()

        return types.void(tile, types.int64, types.int64), generate

    return intrinsic(prefer_literal=True)(move)


tile_load = _moving("llvm.x86.tileloadd64")
tile_store = _moving("llvm.x86.tilestored64")


@intrinsic(prefer_literal=True)
def tile_multiply(_: Any, sums: Any, rows: Any, columns: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "llvm.x86.tdpbf16ps", _tile(sums), _tile(rows), _tile(columns))
        return context.get_dummy_value()

    return types.void(sums, rows, columns), generate


@intrinsic
def expect_store(_: Any, address: Any) -> Any:
    """Prefetches the cache line at `address`, which will be overwritten."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        hints = _I32(1), _I32(3), _I32(1)  # hints: write, into the L1 cache, data
        _call(builder, "llvm.prefetch.p0", builder.inttoptr(args[0], _POINTER), *hints)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def pair_rows(_: Any, first: Any, second: Any, target: Any) -> Any:
    """Two rows of 32 BF16 -> [32, 2]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(_I16, _NUM_HALVES)
        rows = [builder.load(builder.inttoptr(at, kind.as_pointer()), align=2) for at in args[:2]]
        order = [lane for each in range(_NUM_HALVES) for lane in (each, _NUM_HALVES + each)]
        mask = ir.Constant(ir.VectorType(_I32, 2 * _NUM_HALVES), order)
        paired = builder.shuffle_vector(*rows, mask)
        place = ir.VectorType(_I16, 2 * _NUM_HALVES).as_pointer()
        builder.store(paired, builder.inttoptr(args[2], place), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate
