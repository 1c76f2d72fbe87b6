"""Decodes a tile of int8 or e4m3 with a scale a row, see kernels/quantized_weight.py, to BF16 pairs
[16, 32, 2].

A register holds 16 codes: two columns of eight rows. They become FP32, which the row's scale
multiplies; the conversion to BF16 joins two registers to a row of the tile. The bits of E4M3 are
those of an FP16 with another bias: moved up by seven they are the number / 256, also where it is
subnormal. (OCP 8-bit Floating Point Specification, Intel 64 Architectures Software Developer's
Manual, VCVTPH2PS.)
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.gemm.quantized.row_factors import (
    floats_of_halves,
    load,
    of_rows,
    read_bytes,
    scale_reader,
)
from kernels.cpu.simd.amx_tiles import bf16_of_floats

ROW_BYTES = 64  # size of a register, and of half a row of a tile
_LANES, _OCTETS, _PAIRS = 16, 4, 16
_INT8_ZERO = 128.0
_I8, _I16, _I64 = (ir.IntType(bits) for bits in (8, 16, 64))
_FLOATS, _CODES = ir.VectorType(ir.FloatType(), _LANES), ir.VectorType(_I8, _LANES)
_HALVES = ir.VectorType(_I16, _LANES)


@intrinsic
def decode_int8(_: Any, codes: Any, scales: Any, scale_dtype: Any, zeros: Any, out: Any) -> Any:
    """Stores a tile at `out`. All are addresses; `scales` [32] of `scale_dtype`: see
    `scale_reader`; `zeros` [32] uint8, or None for a zero of 128.
    """
    has_zeros = zeros != types.none

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes, scales, _, zeros, out = args
        factors = of_rows(builder, scales, scale_reader(signature.args[2]))
        offsets = [_splat(_INT8_ZERO)] * _OCTETS
        if has_zeros:
            offsets = of_rows(builder, zeros, read_bytes)

        def number(code: Any, octet: int) -> Any:
            return builder.fsub(builder.uitofp(code, _FLOATS), offsets[octet])

        _store_tile(builder, codes, factors, number, out)
        return context.get_dummy_value()

    address = types.int64
    return types.void(address, address, scale_dtype, zeros, address), generate


@intrinsic
def decode_e4m3(_: Any, codes: Any, scales: Any, scale_dtype: Any, out: Any) -> Any:
    """Stores a tile at `out`, without zeros."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes, scales, _, out = args
        factors = of_rows(builder, scales, scale_reader(signature.args[2]))

        def number(code: Any, octet: int) -> Any:
            return _floats_of_e4m3(builder, code)

        _store_tile(builder, codes, factors, number, out)
        return context.get_dummy_value()

    address = types.int64
    return types.void(address, address, scale_dtype, address), generate


def _store_tile(builder: Any, codes: Any, factors: list[Any], number: Any, out: Any) -> None:
    for pair in range(_PAIRS):
        products = []
        for octet in range(_OCTETS):
            code = load(builder, codes, (pair * _OCTETS + octet) * _LANES, _CODES)
            products.append(builder.fmul(number(code, octet), factors[octet]))
        for side in range(2):
            joined = bf16_of_floats(builder, *products[2 * side : 2 * side + 2])
            place = builder.add(out, _I64((2 * pair + side) * ROW_BYTES))
            builder.store(joined, builder.inttoptr(place, joined.type.as_pointer()), align=1)


def _floats_of_e4m3(builder: Any, code: Any) -> Any:
    wide = builder.zext(code, _HALVES)
    magnitude = builder.and_(wide, _constant(_HALVES, 0x7F))
    sign = builder.shl(builder.and_(wide, _constant(_HALVES, 0x80)), _constant(_HALVES, 8))
    halves = builder.or_(sign, builder.shl(magnitude, _constant(_HALVES, 7)))
    numbers = builder.fmul(floats_of_halves(builder, halves), _splat(256.0))
    is_nan = builder.icmp_unsigned("==", magnitude, _constant(_HALVES, 0x7F))
    return builder.select(is_nan, _splat(float("nan")), numbers)


def _splat(number: float) -> Any:
    return _constant(_FLOATS, number)


def _constant(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * _LANES)
