"""32 FP32 numbers as one value of compiled loops: a row of a product's block.

They support +, *, / and so on like numbers, also with a single FP32 number. Results have the bits
of the loops over full tensors (`gated`, `rms_norm`), which do the same operations in the same
order; only subnormal BF16, which AMX treats as 0, becomes 0 immediately.
`store_halves` needs AVX512-BF16, which every CPU with AMX has.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, overload, register_model

from kernels.cpu.compile import compiled
from kernels.cpu.simd.amx_tiles import bf16_of_floats
from kernels.cpu.simd.intrinsics import EXP2, LOG2_E

NUM_FLOATS = 32

_f32 = np.float32

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
_FLOATS, _WORDS = ir.VectorType(_F32, NUM_FLOATS), ir.VectorType(_I32, NUM_FLOATS)
_HALVES = ir.VectorType(_I16, NUM_FLOATS)

# 2**r on [-1/2, 1/2] with 2**0 = 1, highest power first; the largest relative error is 2.9e-6.
_COARSE_EXP2 = (0.00958285, 0.05590642, 0.24024099, 0.69312419, 1.0)
# Added to a number of [-127, 127], it leaves the nearest integer, plus 127, in the last bits.
_SHIFT = 1.5 * 2**23 + 127.0


class FloatsType(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="Floats")


floats = FloatsType()


@register_model(FloatsType)
class _FloatsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _FLOATS)


def _all(value: float) -> Any:
    return ir.Constant(_FLOATS, [value] * NUM_FLOATS)


def _words(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * NUM_FLOATS)


def _splat(builder: Any, x: Any) -> Any:
    one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), x, _I32(0))
    return builder.shuffle_vector(one, one, _words(0))


def _call(builder: Any, name: str, result: Any, *operands: Any, fastmath: Any = ()) -> Any:
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, operands, fastmath=fastmath)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, f"llvm.fma.v{NUM_FLOATS}f32", _FLOATS, a, b, c)


def narrowed_halves(builder: Any, x: Any) -> Any:
    """Generates code that rounds 32 numbers to BF16."""
    lower, upper = (
        builder.shuffle_vector(x, x, ir.Constant(ir.VectorType(_I32, 16), list(range(at, at + 16))))
        for at in (0, 16)
    )
    return bf16_of_floats(builder, lower, upper)


def _widened(builder: Any, halves: Any) -> Any:
    words = builder.shl(builder.zext(halves, _WORDS), _words(16))
    return builder.bitcast(words, _FLOATS)


def _value(generate: Callable[..., Any], *argument_types: Any, result: Any = floats) -> Any:
    """The numba signature, and a generator that calls `generate` with builder and arguments."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return generate(builder, *args)

    return result(*argument_types), code


@intrinsic
def load_floats(_: Any, address: Any) -> Any:
    def generate(builder: Any, address: Any) -> Any:
        return builder.load(builder.inttoptr(address, _FLOATS.as_pointer()), align=4)

    return _value(generate, types.int64)


@intrinsic
def store_floats(_: Any, x: Any, address: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[0], builder.inttoptr(args[1], _FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(floats, types.int64), code


@intrinsic
def load_halves(_: Any, address: Any) -> Any:
    """Loads 32 BF16 numbers, widened to FP32."""

    def generate(builder: Any, address: Any) -> Any:
        place = builder.inttoptr(address, _HALVES.as_pointer())
        return _widened(builder, builder.load(place, align=2))

    return _value(generate, types.int64)


@intrinsic
def store_halves(_: Any, x: Any, address: Any) -> Any:
    """Stores 32 numbers as BF16, rounded to nearest even."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[1], _HALVES.as_pointer())
        builder.store(narrowed_halves(builder, args[0]), place, align=2)
        return context.get_dummy_value()

    return types.void(floats, types.int64), code


@intrinsic
def same(_: Any, x: Any) -> Any:
    """Broadcasts one FP32 number to all lanes."""
    return _value(_splat, types.float32)


@intrinsic
def fma_floats(_: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once."""
    return _value(_fma, floats, floats, floats)


def _selecting(comparison: str) -> Any:
    def select(_: Any, a: Any, b: Any) -> Any:
        def generate(builder: Any, a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(comparison, a, b), a, b)

        return _value(generate, floats, floats)

    return intrinsic(select)


# Lane-wise minimum and maximum; if an operand is NaN, the second operand.
smaller = _selecting("<")
larger = _selecting(">")


@intrinsic
def masked(_: Any, x: Any, start: Any, end: Any) -> Any:
    """Replaces lanes outside [start, end) by -inf."""

    def generate(builder: Any, x: Any, start: Any, end: Any) -> Any:
        lanes = ir.Constant(_WORDS, list(range(NUM_FLOATS)))

        def among(bound: Any) -> Any:
            bits = builder.bitcast(builder.trunc(bound, _I32), _F32)
            return builder.bitcast(_splat(builder, bits), _WORDS)

        is_inside = builder.and_(
            builder.icmp_signed(">=", lanes, among(start)),
            builder.icmp_signed("<", lanes, among(end)),
        )
        return builder.select(is_inside, x, _all(float("-inf")))

    return _value(generate, floats, types.int64, types.int64)


@intrinsic
def largest(_: Any, x: Any) -> Any:
    """The largest lane, ignoring NaN."""

    def generate(builder: Any, x: Any) -> Any:
        name = f"llvm.vector.reduce.fmax.v{NUM_FLOATS}f32"
        return _call(builder, name, _F32, x, fastmath=("nnan",))

    return _value(generate, floats, result=types.float32)


@intrinsic
def first_equal(_: Any, x: Any, value: Any) -> Any:
    """The first lane that equals `value`; NUM_FLOATS if none does."""

    def generate(builder: Any, x: Any, value: Any) -> Any:
        equal = builder.fcmp_ordered("==", x, _splat(builder, value))
        bits = builder.bitcast(equal, _I32)
        lane = _call(builder, "llvm.cttz.i32", _I32, bits, ir.IntType(1)(0))
        return builder.zext(lane, ir.IntType(64))

    return _value(generate, floats, types.float32, result=types.int64)


@intrinsic
def total(_: Any, x: Any) -> Any:
    """The sum of the lanes, as a tree."""

    def generate(builder: Any, x: Any) -> Any:
        name = f"llvm.vector.reduce.fadd.v{NUM_FLOATS}f32"
        return _call(builder, name, _F32, _F32(0.0), x, fastmath=("reassoc",))

    return _value(generate, floats, result=types.float32)


@intrinsic
def exp2_floats(_: Any, x: Any) -> Any:
    """Returns 2^x of each lane, as `intrinsics.exp2` computes it."""

    def generate(builder: Any, x: Any) -> Any:
        x = builder.select(builder.fcmp_ordered(">", x, _all(-127.0)), x, _all(-127.0))
        whole = _call(builder, f"llvm.floor.v{NUM_FLOATS}f32", _FLOATS, builder.fadd(x, _all(0.5)))
        r = builder.fsub(x, whole)
        y = _all(EXP2[0])
        for factor in (*EXP2[1:], 1.0):
            y = _fma(builder, y, r, _all(factor))
        exponent = builder.add(builder.fptosi(whole, _WORDS), _words(127))
        power = builder.bitcast(builder.shl(exponent, _words(23)), _FLOATS)
        return builder.fmul(y, power)

    return _value(generate, floats)


@intrinsic
def weights_of(_: Any, scores: Any, factor: Any, top: Any) -> Any:
    """2**(score · factor - top), at most 2**127, for BF16; 0 below 2**-126."""

    def generate(builder: Any, scores: Any, factor: Any, top: Any) -> Any:
        x = _fma(builder, scores, _splat(builder, factor), builder.fneg(_splat(builder, top)))
        x = builder.select(builder.fcmp_ordered(">", x, _all(-127.0)), x, _all(-127.0))
        shifted = builder.fadd(x, _all(_SHIFT))
        r = builder.fsub(x, builder.fsub(shifted, _all(_SHIFT)))
        y = _all(_COARSE_EXP2[0])
        for term in _COARSE_EXP2[1:]:
            y = _fma(builder, y, r, _all(term))
        exponent = builder.shl(builder.bitcast(shifted, _WORDS), _words(23))
        return builder.fmul(y, builder.bitcast(exponent, _FLOATS))

    return _value(generate, floats, types.float32, types.float32)


@compiled(is_inlined=True)
def tanh_floats(x: Any) -> Any:
    """1 - 2 / (1 + e**2x), clamped against overflow."""
    x = larger(same(_f32(-20.0)), smaller(same(_f32(20.0)), x))
    return _f32(1.0) - _f32(2.0) / (_f32(1.0) + exp2_floats(x * _f32(2 * LOG2_E)))


def _operation(operation: Any, name: str) -> None:
    @intrinsic
    def apply(_: Any, a: Any, b: Any) -> Any:
        def generate(builder: Any, a: Any, b: Any) -> Any:
            return getattr(builder, name)(a, b)

        return _value(generate, floats, floats)

    @overload(operation, strict=False)
    def choose(a: Any, b: Any) -> Any:
        if a == floats and b == floats:
            return lambda a, b: apply(a, b)
        if a == floats and b is types.float32:
            return lambda a, b: apply(a, same(b))
        if a is types.float32 and b == floats:
            return lambda a, b: apply(same(a), b)
        return None


_operation(operator.add, "fadd")
_operation(operator.sub, "fsub")
_operation(operator.mul, "fmul")
_operation(operator.truediv, "fdiv")
