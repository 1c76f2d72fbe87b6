"""Reads scales and zeros of a tile's 32 rows, as FP32: eight rows to a register, each twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

_LANES, _OCTETS = 16, 4
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), _LANES), ir.VectorType(_I32, _LANES)

Reader = Callable[[Any, Any, int], Any]  # builder, address, first row -> FP32 of 16 rows


def of_rows(builder: Any, address: Any, read: Reader) -> list[Any]:
    """FP32 of 32 rows, of eight rows to a register and each twice."""
    sixteens = [read(builder, address, first) for first in (0, _LANES)]
    found = []
    for octet in range(_OCTETS):
        lanes = [octet % 2 * 8 + lane // 2 for lane in range(_LANES)]
        numbers = sixteens[octet // 2]
        found.append(builder.shuffle_vector(numbers, numbers, ir.Constant(_WORDS, lanes)))
    return found


def scale_reader(scale_dtype: Any) -> Reader:
    """Returns the reader of FP32, or of the bits of BF16 (uint16) or FP16 (int16), or of exponents
    (uint8).
    """
    match scale_dtype.dtype:
        case types.float32:
            return _read_floats
        case types.uint16:
            return _read_brain_floats
        case types.int16:
            return _read_halves
        case types.uint8:
            return _read_powers
    raise NotImplementedError(f"scales of {scale_dtype}")


def read_bytes(builder: Any, address: Any, first: int) -> Any:
    return builder.uitofp(load(builder, address, first, ir.VectorType(_I8, _LANES)), _FLOATS)


def load(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    place = builder.add(address, _I64(offset))
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=1)


def _read_floats(builder: Any, address: Any, first: int) -> Any:
    return load(builder, address, 4 * first, _FLOATS)


def _read_brain_floats(builder: Any, address: Any, first: int) -> Any:
    halves = load(builder, address, 2 * first, ir.VectorType(_I16, _LANES))
    upper = builder.shl(builder.zext(halves, _WORDS), ir.Constant(_WORDS, [16] * _LANES))
    return builder.bitcast(upper, _FLOATS)


def _read_halves(builder: Any, address: Any, first: int) -> Any:
    halves = load(builder, address, 2 * first, ir.VectorType(_I16, _LANES))
    return floats_of_halves(builder, halves)


def _read_powers(builder: Any, address: Any, first: int) -> Any:
    """2^(e - 127), which are the exponents of FP32; no e is 0 or 255."""
    exponents = builder.zext(load(builder, address, first, ir.VectorType(_I8, _LANES)), _WORDS)
    bits = builder.shl(exponents, ir.Constant(_WORDS, [23] * _LANES))
    return builder.bitcast(bits, _FLOATS)


def floats_of_halves(builder: Any, halves: Any) -> Any:
    """The bits of 16 FP16 -> FP32, exactly (VCVTPH2PS, which heeds no mode for subnormals)."""
    return builder.fpext(builder.bitcast(halves, ir.VectorType(ir.HalfType(), _LANES)), _FLOATS)
