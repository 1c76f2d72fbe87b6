"""Converts up to 32 FP32, BF16 or FP16 numbers of an `array` as one value, on any CPU.

A dtype is that of the array in compiled code: the type in `BITS` for types that numba lacks.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.simd.cpu_features import has_pair_products
from kernels.cpu.simd.f32x32 import NUM_FLOATS, floats, narrowed_halves
from kernels.cpu.simd.intrinsics import bits_of_bf16

_WORD, _FLOAT = ir.IntType(32), ir.FloatType()
_FLOATS, _WORDS = ir.VectorType(_FLOAT, NUM_FLOATS), ir.VectorType(_WORD, NUM_FLOATS)
_MASK = ir.VectorType(ir.IntType(1), NUM_FLOATS)
_STORED = {
    types.float32: (_FLOAT, "f32"),
    types.uint16: (ir.IntType(16), "i16"),
    types.int16: (ir.HalfType(), "f16"),
}


@intrinsic
def load_numbers(_: Any, address: Any, dtype: Any, count: Any) -> Any:
    """Loads the min(`count`, 32) numbers at an address, widened to FP32; other lanes are 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place, kind, align, name = _place(builder, args[0], dtype)
        is_whole = builder.icmp_signed(">=", args[2], ir.Constant(args[2].type, NUM_FLOATS))
        with builder.if_else(is_whole, likely=True) as (whole, part):
            with whole:
                every, every_block = builder.load(place, align=align), builder.block
            with part:
                zeros = ir.Constant(kind, None)
                operands = place, align, _first(builder, args[2]), zeros
                some = _call(builder, f"llvm.masked.load.{name}.p0", kind, *operands)
                some_block = builder.block
        stored = builder.phi(kind)
        stored.add_incoming(every, every_block)
        stored.add_incoming(some, some_block)
        return _widened(builder, stored)

    return floats(types.int64, dtype, types.int64), generate


@intrinsic
def store_numbers(_: Any, x: Any, address: Any, dtype: Any, count: Any) -> Any:
    """Stores the first min(`count`, 32) numbers, rounded to nearest even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place, kind, align, name = _place(builder, args[1], dtype)
        rounded = _narrowed(builder, args[0], kind)
        is_whole = builder.icmp_signed(">=", args[3], ir.Constant(args[3].type, NUM_FLOATS))
        with builder.if_else(is_whole, likely=True) as (whole, part):
            with whole:
                builder.store(rounded, place, align=align)
            with part:
                operands = rounded, place, align, _first(builder, args[3])
                _call(builder, f"llvm.masked.store.{name}.p0", ir.VoidType(), *operands)
        return context.get_dummy_value()

    return types.void(floats, types.int64, dtype, types.int64), generate


@intrinsic
def rounded_as(_: Any, x: Any, dtype: Any) -> Any:
    """Rounds to the nearest even number of the dtype."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element, _ = _STORED[dtype.dtype]
        return _widened(builder, _narrowed(builder, args[0], ir.VectorType(element, NUM_FLOATS)))

    return floats(floats, dtype), generate


def _place(builder: Any, address: Any, dtype: Any) -> tuple[Any, Any, Any, str]:
    element, name = _STORED[dtype.dtype]
    kind = ir.VectorType(element, NUM_FLOATS)
    align = 4 if element is _FLOAT else 2
    return builder.inttoptr(address, kind.as_pointer()), kind, align, f"v{NUM_FLOATS}{name}"


def _first(builder: Any, count: Any) -> Any:
    """A mask of the first `count` lanes."""
    count = builder.trunc(count, _WORD)
    one = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), count, _WORD(0))
    counts = builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * NUM_FLOATS))
    lanes = ir.Constant(_WORDS, list(range(NUM_FLOATS)))
    return builder.icmp_signed("<", lanes, counts)


def _widened(builder: Any, stored: Any) -> Any:
    if stored.type.element == _FLOAT:
        return stored
    if stored.type.element == ir.HalfType():
        return builder.fpext(stored, _FLOATS)
    words = builder.shl(builder.zext(stored, _WORDS), ir.Constant(_WORDS, [16] * NUM_FLOATS))
    return builder.bitcast(words, _FLOATS)


def _narrowed(builder: Any, x: Any, kind: Any) -> Any:
    if kind.element == _FLOAT:
        return x
    if kind.element == ir.HalfType():
        return builder.fptrunc(x, kind)
    return narrowed_halves(builder, x) if has_pair_products() else bits_of_bf16(builder, x)


def _call(builder: Any, name: str, result: Any, *operands: Any) -> Any:
    operands = tuple(_WORD(each) if isinstance(each, int) else each for each in operands)
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, operands)
