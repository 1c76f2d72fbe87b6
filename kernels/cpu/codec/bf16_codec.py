"""BF16 words in a little over 11 bits: lower bytes verbatim, upper bytes in three bits.

A word's upper byte holds its sign and the upper seven bits of its exponent. In a row of weights
nearly all upper bytes take one of seven values: `base` to `base + 3`, and the negative `base + 1`
to `base + 3`. These are stored as a sign and two bits above the base. The eighth code, negative
and 0, marks a byte that is the next one of a stream of *verbatim* bytes. So every word is exact
before anything is multiplied by it, whatever its bits are.

A block of 32 rows of 32 words is a record of RECORD_BYTES, in 16 groups of two rows:

    [16, 64]  lower bytes
    [4, 64]   two bits above the base, of four groups in each byte
    [2, 64]   signs, of eight groups in each byte

Lane l of a group is word 8 · (l / 16) + l mod 8 of its first row if l mod 16 < 8, else of its
second: the order in which bytes of two registers are interleaved, within each 16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

BLOCK = 32
LANES = 64  # bytes of a group
RECORD_BYTES = 1408
VERBATIM_READ = 64  # bytes that are read at a time, starting at the next verbatim one
WINDOW = 4  # magnitudes, starting at the base
VERBATIM = 0x80  # code of a value above the base
NUM_GROUPS = 16  # groups of a block
_BITS_AT, _SIGNS_AT = 1024, 1280

# [2, 32]: the lane of each word of a group's two rows
LANE_OF = np.array(
    [[16 * (word // 8) + 8 * row + word % 8 for word in range(BLOCK)] for row in range(2)]
)

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_POINTER = _I8.as_pointer()
_BYTES, _WORDS = ir.VectorType(_I8, LANES), ir.VectorType(ir.IntType(16), LANES // 2)
_FLAGS = ir.VectorType(ir.IntType(1), LANES)


@intrinsic(prefer_literal=True)
def decode_block(
    _: Any, record: Any, verbatim: Any, bases: Any, bases_stride: Any, out: Any, out_stride: Any
) -> Any:
    """Stores a record's rows at `out`. Returns the address of the next record's verbatim bytes.

    All arguments are addresses, or row strides in bytes. `bases` are LANES bytes per group; all
    groups share the same bases if the stride is a literal 0.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        record, verbatim, bases, bases_stride, out, out_stride = args
        expand = _function(
            builder, "llvm.masked.expandload.v64i8", _BYTES, [_POINTER, _FLAGS, _BYTES]
        )
        for group in range(NUM_GROUPS):
            if group == 0 or not _is_zero(signature.args[3]):
                base = _load(builder, bases, 0)
                bases = builder.add(bases, bases_stride)
            if group % 4 == 0:
                bits = _load(builder, record, _BITS_AT + group // 4 * LANES)
            if group % 8 == 0:
                signs = _load(builder, record, _SIGNS_AT + group // 8 * LANES)
            above = builder.and_(_right(builder, bits, 2 * (group % 4)), _all(WINDOW - 1))
            sign = builder.and_(_left(builder, signs, 7 - group % 8), _all(0x80))
            upper = builder.or_(builder.add(base, above), sign)
            verbatim_upper = builder.or_(base, _all(VERBATIM))
            is_verbatim = builder.icmp_unsigned("==", upper, verbatim_upper)
            place = builder.inttoptr(verbatim, _POINTER)
            upper = builder.call(expand, [place, is_verbatim, upper])
            verbatim = builder.add(verbatim, _count(builder, is_verbatim))
            lower = _load(builder, record, group * LANES)
            for row in range(2):
                words = [each for lane in LANE_OF[row] for each in (lane, LANES + lane)]
                _store(builder, _picked(builder, lower, upper, words), out, 0)
                out = builder.add(out, out_stride)
        return verbatim

    return types.int64(record, verbatim, bases, bases_stride, out, out_stride), generate


@intrinsic(prefer_literal=True)
def encode_block(
    _: Any, rows: Any, rows_stride: Any, bases: Any, bases_stride: Any, record: Any, verbatim: Any
) -> Any:
    """The inverse of `decode_block`. Returns the address for the next record's verbatim bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, rows_stride, bases, bases_stride, record, verbatim = args
        compress = _function(
            builder, "llvm.masked.compressstore.v64i8", ir.VoidType(), [_BYTES, _POINTER, _FLAGS]
        )
        lanes = np.argsort(LANE_OF.ravel())  # the word of each lane, of both rows
        bits = signs = _all(0)
        for group in range(NUM_GROUPS):
            if group == 0 or not _is_zero(signature.args[3]):
                base = _load(builder, bases, 0)
                bases = builder.add(bases, bases_stride)
            first = _load(builder, rows, 0)
            rows = builder.add(rows, rows_stride)
            second = _load(builder, rows, 0)
            rows = builder.add(rows, rows_stride)
            upper = _picked(builder, first, second, [2 * word + 1 for word in lanes])
            _store(
                builder,
                _picked(builder, first, second, [2 * word for word in lanes]),
                record,
                group * LANES,
            )
            above = builder.sub(builder.and_(upper, _all(0x7F)), base)
            sign = builder.and_(upper, _all(0x80))
            is_verbatim = builder.or_(
                builder.icmp_unsigned(">=", above, _all(WINDOW)),
                builder.icmp_unsigned("==", builder.or_(above, sign), _all(VERBATIM)),
            )
            builder.call(compress, [upper, builder.inttoptr(verbatim, _POINTER), is_verbatim])
            verbatim = builder.add(verbatim, _count(builder, is_verbatim))
            above = builder.select(is_verbatim, _all(0), above)
            sign = builder.select(is_verbatim, _all(0x80), sign)
            bits = builder.or_(bits, _left(builder, above, 2 * (group % 4)))
            signs = builder.or_(signs, _right(builder, sign, 7 - group % 8))
            if group % 4 == 3:
                _store(builder, bits, record, _BITS_AT + group // 4 * LANES)
                bits = _all(0)
            if group % 8 == 7:
                _store(builder, signs, record, _SIGNS_AT + group // 8 * LANES)
                signs = _all(0)
        return verbatim

    return types.int64(rows, rows_stride, bases, bases_stride, record, verbatim), generate


def _is_zero(literal: Any) -> bool:
    return getattr(literal, "literal_value", None) == 0


def _function(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    return builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(result, arguments), name
    )


def _load(builder: Any, address: Any, offset: int) -> Any:
    place = builder.add(address, _I64(offset))
    return builder.load(builder.inttoptr(place, _BYTES.as_pointer()), align=1)


def _store(builder: Any, vector: Any, address: Any, offset: int) -> None:
    place = builder.add(address, _I64(offset))
    builder.store(vector, builder.inttoptr(place, _BYTES.as_pointer()), align=1)


def _all(value: int) -> Any:
    return ir.Constant(_BYTES, [value] * LANES)


def _left(builder: Any, vector: Any, num_bits: int) -> Any:
    """Shifts words, as there is no instruction for bytes: bits that cross bytes are masked or 0."""
    by = ir.Constant(_WORDS, [num_bits] * (LANES // 2))
    return builder.bitcast(builder.shl(builder.bitcast(vector, _WORDS), by), _BYTES)


def _right(builder: Any, vector: Any, num_bits: int) -> Any:
    by = ir.Constant(_WORDS, [num_bits] * (LANES // 2))
    return builder.bitcast(builder.lshr(builder.bitcast(vector, _WORDS), by), _BYTES)


def _count(builder: Any, flags: Any) -> Any:
    count = _function(builder, "llvm.ctpop.i64", _I64, [_I64])
    return builder.call(count, [builder.bitcast(flags, _I64)])


def _picked(builder: Any, first: Any, second: Any, indices: Any) -> Any:
    """Picks bytes by index from the concatenation of two vectors."""
    mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [int(each) for each in indices])
    return builder.shuffle_vector(first, second, mask)
