"""Decodes a tile of int4, see kernels/quantized_weight.py, to BF16 pairs [16, 32, 2].

A register holds the words of eight rows, two of each row: shifted by 4 · j their lowest nibbles
are columns 2 · j and 2 · j + 1. A table maps nibbles to FP32; the conversion to BF16 joins two
registers to a row of the tile. (Intel 64 Architectures Software Developer's Manual, VPERMPS,
VCVTNE2PS2BF16.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.simd.amx_tiles import bf16_of_floats

ROW_BYTES = 64  # size of a register, and of half a row of a tile
_LANES, _OCTETS, _PAIRS = 16, 4, 8
_I8, _I16, _I32, _I64, _F32 = *(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType()
_FLOATS, _WORDS = ir.VectorType(_F32, _LANES), ir.VectorType(_I32, _LANES)


@intrinsic
def decode_int4(_: Any, codes: Any, scales: Any, scale_dtype: Any, zeros: Any, out: Any) -> Any:
    """Stores a tile at `out`. All are addresses; `scales` [32] of `scale_dtype`, FP32 or the bits
    of BF16; `zeros` [32] uint8, or None for a zero of 8.
    """
    has_zeros = zeros != types.none

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes, scales, _, zeros, out = args
        is_float = signature.args[2].dtype == types.float32
        factors = _of_rows(builder, scales, _floats if is_float else _halves)
        table = [float(code - (0 if has_zeros else 8)) for code in range(_LANES)]
        offsets = _of_rows(builder, zeros, _bytes) if has_zeros else None
        for half in range(2):
            words = [
                _load(builder, codes, (half * _OCTETS + octet) * ROW_BYTES, _WORDS)
                for octet in range(_OCTETS)
            ]
            for pair in range(_PAIRS):
                numbers = []
                for octet, word in enumerate(words):
                    index = builder.lshr(word, ir.Constant(_WORDS, [4 * pair] * _LANES))
                    number = _permuted(builder, ir.Constant(_FLOATS, table), index)
                    if offsets is not None:
                        number = builder.fsub(number, offsets[octet])
                    numbers.append(builder.fmul(number, factors[octet]))
                row = (half * _PAIRS + pair) * 2
                for side in range(2):
                    joined = bf16_of_floats(builder, *numbers[2 * side : 2 * side + 2])
                    place = builder.add(out, _I64((row + side) * ROW_BYTES))
                    builder.store(
                        joined, builder.inttoptr(place, joined.type.as_pointer()), align=1
                    )
        return context.get_dummy_value()

    address = types.int64
    return types.void(address, address, scale_dtype, zeros, address), generate


def _permuted(builder: Any, table: Any, index: Any) -> Any:
    """table[index mod 16] of each lane: the instruction ignores the upper bits."""
    name = "llvm.x86.avx512.permvar.sf.512"
    function = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(_FLOATS, [_FLOATS, _WORDS]), name
    )
    return builder.call(function, [table, index])


def _of_rows(builder: Any, address: Any, read: Callable[[Any, Any, int], Any]) -> list[Any]:
    """FP32 of 32 rows, of eight rows to a register and each twice."""
    sixteens = [read(builder, address, first) for first in (0, _LANES)]
    found = []
    for octet in range(_OCTETS):
        lanes = [octet % 2 * 8 + lane // 2 for lane in range(_LANES)]
        numbers = sixteens[octet // 2]
        found.append(builder.shuffle_vector(numbers, numbers, ir.Constant(_WORDS, lanes)))
    return found


def _floats(builder: Any, address: Any, first: int) -> Any:
    return _load(builder, address, 4 * first, _FLOATS)


def _halves(builder: Any, address: Any, first: int) -> Any:
    halves = _load(builder, address, 2 * first, ir.VectorType(_I16, _LANES))
    upper = builder.shl(builder.zext(halves, _WORDS), ir.Constant(_WORDS, [16] * _LANES))
    return builder.bitcast(upper, _FLOATS)


def _bytes(builder: Any, address: Any, first: int) -> Any:
    return builder.uitofp(_load(builder, address, first, ir.VectorType(_I8, _LANES)), _FLOATS)


def _load(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    place = builder.add(address, _I64(offset))
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=1)
