"""A row of ROW_LANES FP32 numbers in vector registers, for compiled loops on CPUs with AMX.

Written as vectors, a row's softmax is one run of instructions, without loops and without detours
through memory. Addresses are integers; nothing has to be aligned.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from kernels.cpu.amx import bf16_of_floats

ROW_LANES = 128

_I32, _F32 = ir.IntType(32), ir.FloatType()
_FLOATS, _WORDS = ir.VectorType(_F32, ROW_LANES), ir.VectorType(_I32, ROW_LANES)
# 2**r on [-1/2, 1/2] with 2**0 = 1, highest power first; the largest relative error is 2.9e-6.
_EXP2 = (0.00958285, 0.05590642, 0.24024099, 0.69312419, 1.0)
# Added to a number of [-127, 127], it leaves the nearest integer, plus 127, in the last bits.
_SHIFT = 1.5 * 2**23 + 127.0


class RowType(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="Row")


_row = RowType()


@register_model(RowType)
class _RowModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _FLOATS)


def _all(value: float) -> Any:
    return ir.Constant(_FLOATS, [value] * ROW_LANES)


def _splat(builder: Any, x: Any) -> Any:
    one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), x, _I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * ROW_LANES))


def _call(builder: Any, name: str, result: Any, *operands: Any, fastmath: Any = ()) -> Any:
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, operands, fastmath=fastmath)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, f"llvm.fma.v{ROW_LANES}f32", _FLOATS, a, b, c)


@intrinsic
def load_row(_: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], _FLOATS.as_pointer()), align=4)

    return _row(types.int64), generate


@intrinsic
def mask_row(_: Any, row: Any, start: Any, end: Any) -> Any:
    """-inf in the lanes outside of [start, end)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row, start, end = args
        lanes = ir.Constant(_WORDS, list(range(ROW_LANES)))

        def among(bound: Any) -> Any:
            return builder.bitcast(_splat(builder, builder.bitcast(bound, _F32)), _WORDS)

        is_inside = builder.and_(
            builder.icmp_signed(">=", lanes, among(start)),
            builder.icmp_signed("<", lanes, among(end)),
        )
        return builder.select(is_inside, row, _all(float("-inf")))

    return _row(_row, types.int32, types.int32), generate


@intrinsic
def largest(_: Any, row: Any) -> Any:
    """The largest lane; those that are no numbers are ignored."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name = f"llvm.vector.reduce.fmax.v{ROW_LANES}f32"
        return _call(builder, name, _F32, args[0], fastmath=("nnan",))

    return types.float32(_row), generate


@intrinsic
def total(_: Any, row: Any) -> Any:
    """The sum of the lanes, as a tree: in one order, whatever they are."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name = f"llvm.vector.reduce.fadd.v{ROW_LANES}f32"
        return _call(builder, name, _F32, _F32(0.0), args[0], fastmath=("reassoc",))

    return types.float32(_row), generate


@intrinsic
def exp2_row(_: Any, row: Any, scale: Any, top: Any) -> Any:
    """2**(row · scale - top), at most 2**127; 0 below 2**-126."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row, scale, top = args
        x = _fma(builder, row, _splat(builder, scale), builder.fneg(_splat(builder, top)))
        x = builder.select(builder.fcmp_ordered(">", x, _all(-127.0)), x, _all(-127.0))
        shifted = builder.fadd(x, _all(_SHIFT))
        r = builder.fsub(x, builder.fsub(shifted, _all(_SHIFT)))
        y = _all(_EXP2[0])
        for factor in _EXP2[1:]:
            y = _fma(builder, y, r, _all(factor))
        exponent = builder.shl(
            builder.bitcast(shifted, _WORDS), ir.Constant(_WORDS, [23] * ROW_LANES)
        )
        return builder.fmul(y, builder.bitcast(exponent, _FLOATS))

    return _row(_row, types.float32, types.float32), generate


@intrinsic
def store_as_bf16(_: Any, row: Any, address: Any) -> Any:
    """Rounded to the nearest even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row, address = args
        for first in range(0, ROW_LANES, 32):
            lower, upper = (
                builder.shuffle_vector(
                    row, row, ir.Constant(ir.VectorType(_I32, 16), list(range(at, at + 16)))
                )
                for at in (first, first + 16)
            )
            halves = bf16_of_floats(builder, lower, upper)
            place = builder.add(address, ir.IntType(64)(first * 2))
            builder.store(halves, builder.inttoptr(place, halves.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(_row, types.int64), generate
