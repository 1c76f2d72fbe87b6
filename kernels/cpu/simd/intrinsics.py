"""Primitives of the compiled loops: half precision as bits, fused multiply-add, exp2."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.compile import compiled

# The stand-in for a dtype that numba lacks; FP32 needs none.
BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
LOG2_E = math.log2(math.e)
# Sums run in this many interleaved chains. LLVM unrolls loops over fewer before it searches for
# vectors in them, and they end up scalar.
LANES = 64
# Waking the threads costs more than it saves for cheap operations on up to this many rows.
FEW_ROWS = 64

_WORD, _ADDRESS = ir.IntType(32), ir.IntType(64)
_NOTHING = _ADDRESS(0)
SIDE = 16  # rows and columns of the squares that are transposed

_f32 = np.float32
_i32 = np.int32
# Least-squares fit of 2**r on [-1/2, 1/2] with 2**0 = 1, highest power first; its error is below
# 1e-7.
EXP2 = (0.00015403530, 0.0013395752, 0.0096184373, 0.055503324, 0.24022651, 0.69314720)
_C6, _C5, _C4, _C3, _C2, _C1 = (_f32(each) for each in EXP2)


def array(tensor: Tensor) -> NDArray[Any]:
    """The tensor's memory in the form that the compiled loops take."""
    bits = BITS.get(tensor.dtype)
    return tensor.numpy() if bits is None else tensor.view(bits).numpy()


@intrinsic
def fma(_: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def float_of_bits(_: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def bits_of_float(_: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


def bits_of_bf16(builder: Any, x: Any) -> Any:
    """Generates code that rounds FP32, one number or a vector, to the nearest even BF16.

    All in 32 bits: numba's own integers have 64, and vectors of them half as many lanes.
    """
    is_vector = isinstance(x.type, ir.VectorType)

    def like_x(element: Any) -> Any:
        return ir.VectorType(element, x.type.count) if is_vector else element

    def each(value: int) -> Any:
        return ir.Constant(like_x(_WORD), [value] * x.type.count if is_vector else value)

    bits = builder.bitcast(x, like_x(_WORD))
    upper = builder.lshr(bits, each(16))
    to_even = builder.add(builder.and_(upper, each(1)), each(0x7FFF))
    rounded = builder.lshr(builder.add(bits, to_even), each(16))
    quiet = builder.or_(upper, each(0x40))
    is_number = builder.fcmp_ordered("ord", x, x)
    return builder.trunc(builder.select(is_number, rounded, quiet), like_x(ir.IntType(16)))


@intrinsic
def _bf16_of_float(_: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return bits_of_bf16(builder, args[0])

    return types.uint16(types.float32), generate


@intrinsic
def _float_of_half(_: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), generate


@intrinsic
def _half_of_float(_: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), generate


@intrinsic
def sum_of_lanes(_: Any, address: Any) -> Any:
    """Sums LANES FP32 numbers at an address as a tree, in an order independent of their values."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.FloatType(), LANES)
        vector = builder.load(builder.inttoptr(args[0], kind.as_pointer()), align=4)
        operands = [ir.Constant(ir.FloatType(), 0.0), vector]
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        function = builder.module.globals.get(name) or ir.Function(
            builder.module, ir.FunctionType(ir.FloatType(), [each.type for each in operands]), name
        )
        return builder.call(function, operands, fastmath=("reassoc",))

    return types.float32(types.int64), generate


@intrinsic
def expect_load(_: Any, address: Any) -> Any:
    """Prefetches the cache line at `address`, which will be read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        hints = _WORD(0), _WORD(3), _WORD(1)  # hints: read, into the L1 cache, data
        name = "llvm.prefetch.p0"
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, *(each.type for each in hints)])
        fetch = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        builder.call(fetch, [pointer, *hints])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic(prefer_literal=True)
def add_chains(
    _: Any,
    sums: Any,
    factors: Any,
    rows: Any,
    num_rows: Any,
    num_sums: Any,
    num_lanes: Any,
    most: Any,
    is_fresh: Any,
) -> Any:
    """sums[s, num_lanes] += factors[s, i] · rows[i], fused, sequentially over i; FP32.

    `sums`, `factors` and `rows` are (address, row stride in bytes); the last three arguments are
    literals. `is_fresh`: the sums start at 0 and ignore the memory's content. `most` sums at a time
    (at most 16) stay in registers, and take hardly longer than one, as long as they keep a core's
    multipliers busy while each chain waits for its last product.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes, most_sums, starts = (each.literal_value for each in signature.args[5:])
        places = [cgutils.unpack_tuple(builder, each, 2) for each in args[:3]]
        sums, factors, rows = (Strided(builder, *each) for each in places)
        num_rows, num_sums = args[3:5]

        def add(first: Any, count: int) -> None:
            group = sums.below(first), factors.below(first), rows
            _add_group(builder, *group, num_rows, count, lanes, starts)

        in_groups(builder, num_sums, most_sums, add)
        return context.get_dummy_value()

    pair = types.UniTuple(types.int64, 2)
    places = pair, pair, pair, types.int64, types.int64
    return types.void(*places, num_lanes, most, is_fresh), generate


def in_groups(builder: Any, num: Any, most: int, add: Callable[[Any, int], None]) -> None:
    """Generates code that processes `num` rows by `add(first, count)`: `most` at a time, at most
    16, and the rest in groups of 8, 4, 2 and 1, by the bits of its number.
    """
    with cgutils.for_range(builder, builder.sdiv(num, _ADDRESS(most))) as loop:
        add(builder.mul(loop.index, _ADDRESS(most)), most)
    rest = builder.srem(num, _ADDRESS(most))
    for count in (8, 4, 2, 1):
        if count < most:
            bit = builder.and_(rest, _ADDRESS(count))
            with builder.if_then(builder.icmp_signed("!=", bit, _ADDRESS(0))):
                add(builder.sub(num, rest), count)
            rest = builder.sub(rest, bit)


class Strided:
    """Rows of memory with a stride, in generated code."""

    def __init__(self, builder: Any, address: Any, stride: Any) -> None:
        self._builder, self._address, self._stride = builder, address, stride

    def below(self, index: Any) -> Strided:
        return Strided(self._builder, self._at(index), self._stride)

    def place(self, index: Any, kind: Any, offset: Any = _NOTHING) -> Any:
        return self._builder.inttoptr(self._builder.add(self._at(index), offset), kind.as_pointer())

    def _at(self, index: Any) -> Any:
        return self._builder.add(self._address, self._builder.mul(index, self._stride))


def _add_group(
    builder: Any,
    sums: Strided,
    factors: Strided,
    rows: Strided,
    num_rows: Any,
    count: int,
    lanes: int,
    starts: bool,
) -> None:
    kind = ir.VectorType(ir.FloatType(), lanes)
    every_lane = ir.Constant(ir.VectorType(_WORD, lanes), [0] * lanes)
    name = f"llvm.fma.v{lanes}f32"
    fused = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(kind, [kind] * 3), name
    )
    places = [sums.place(_ADDRESS(index), kind) for index in range(count)]
    zeros = ir.Constant(kind, None)
    begun = [zeros if starts else builder.load(place, align=4) for place in places]
    held = [cgutils.alloca_once_value(builder, each) for each in begun]
    with cgutils.for_range(builder, num_rows) as loop:
        row = builder.load(rows.place(loop.index, kind), align=4)
        column = builder.mul(loop.index, _ADDRESS(4))
        for index, each in enumerate(held):
            factor = builder.load(factors.place(_ADDRESS(index), ir.FloatType(), column))
            one = builder.insert_element(ir.Constant(kind, ir.Undefined), factor, _WORD(0))
            factor = builder.shuffle_vector(one, one, every_lane)
            builder.store(builder.call(fused, [factor, row, builder.load(each)]), each)
    for place, each in zip(places, held, strict=True):
        builder.store(builder.load(each), place, align=4)


@intrinsic
def transpose_words(_: Any, source: Any, source_bytes: Any, target: Any, target_bytes: Any) -> Any:
    """Transposes 16 x 16 words of 32 bits, with row strides in bytes, in four exchange rounds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, source_bytes, target, target_bytes = args
        kind = ir.VectorType(_WORD, SIDE)
        lanes = range(SIDE)

        def row(address: Any, stride: Any, index: int) -> Any:
            offset = builder.mul(stride, ir.Constant(_ADDRESS, index))
            return builder.inttoptr(builder.add(address, offset), kind.as_pointer())

        rows = [builder.load(row(source, source_bytes, index), align=4) for index in lanes]
        for distance in (8, 4, 2, 1):
            lower = [i if not i & distance else SIDE + i - distance for i in lanes]
            upper = [i + distance if not i & distance else SIDE + i for i in lanes]
            for index in lanes:
                if not index & distance:
                    pair = rows[index], rows[index + distance]
                    rows[index], rows[index + distance] = (
                        builder.shuffle_vector(*pair, ir.Constant(kind, order))
                        for order in (lower, upper)
                    )
        for index in lanes:
            builder.store(rows[index], row(target, target_bytes, index), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


def widen(x: Any) -> Any:
    """An element of an `array` as FP32."""
    raise NotImplementedError("compiled code only")


def narrow(x: Any, dtype: Any) -> Any:
    """FP32 `x` as an element of an `array` of `dtype`, rounded to nearest even."""
    raise NotImplementedError("compiled code only")


@overload(widen, strict=False)
def _widen(x: Any) -> Any:
    if x is types.float32:
        return lambda x: x
    if x is types.int16:
        return lambda x: _float_of_half(x)
    return lambda x: float_of_bits(_i32(_i32(x) << 16))


@overload(narrow, strict=False)
def _narrow(x: Any, dtype: Any) -> Any:
    if dtype.dtype is types.float32:
        return lambda x, dtype: x
    if dtype.dtype is types.int16:
        return lambda x, dtype: _half_of_float(x)
    return lambda x, dtype: _bf16_of_float(x)


@compiled()
def exp2(x: Any) -> Any:
    """2**x for x in [-inf, 128], within a unit or two in the last place; 0 below 2**-126."""
    x = x if x > _f32(-127.0) else _f32(-127.0)
    whole = np.floor(x + _f32(0.5))
    r = x - whole
    y = fma(_C6, r, _C5)
    y = fma(y, r, _C4)
    y = fma(y, r, _C3)
    y = fma(y, r, _C2)
    y = fma(y, r, _C1)
    y = fma(y, r, _f32(1.0))
    return y * float_of_bits(_i32((_i32(whole) + _i32(127)) << _i32(23)))


@compiled()
def tanh(x: Any) -> Any:
    """1 - 2 / (1 + e**2x), computed for |x| so that nothing overflows."""
    size = min(abs(x), _f32(20.0))
    y = _f32(1.0) - _f32(2.0) / (_f32(1.0) + exp2(size * _f32(2 * LOG2_E)))
    return y if x >= _f32(0.0) else -y
