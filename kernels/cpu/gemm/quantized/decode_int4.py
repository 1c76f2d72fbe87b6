"""Decodes a tile of int4 or e2m1, see kernels/quantized_weight.py, to BF16 pairs [16, 32, 2].

A register holds the words of eight rows, two of each row: shifted by 4 · j their lowest nibbles
are columns 2 · j and 2 · j + 1. A table maps nibbles to FP32; the conversion to BF16 joins two
registers to a row of the tile. (Intel 64 Architectures Software Developer's Manual, VPERMPS,
VCVTNE2PS2BF16.)
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.gemm.quantized.row_factors import load, of_rows, read_bytes, scale_reader
from kernels.cpu.simd.amx_tiles import bf16_of_floats
from kernels.quantized_weight import E2M1

ROW_BYTES = 64  # size of a register, and of half a row of a tile
_LANES, _OCTETS, _PAIRS = 16, 4, 8
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), _LANES), ir.VectorType(_I32, _LANES)


@intrinsic
def decode_int4(_: Any, codes: Any, scales: Any, scale_dtype: Any, zeros: Any, out: Any) -> Any:
    """Stores a tile at `out`. All are addresses; `scales` [32] of `scale_dtype`: see
    `scale_reader`; `zeros` [32] uint8, or None for a zero of 8. With exponents as scales, codes are
    E2M1.
    """
    has_zeros = zeros != types.none

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes, scales, _, zeros, out = args
        factors = of_rows(builder, scales, scale_reader(signature.args[2]))
        table = [float(code - (0 if has_zeros else 8)) for code in range(_LANES)]
        if signature.args[2].dtype == types.uint8:
            table = list(E2M1)
        offsets = of_rows(builder, zeros, read_bytes) if has_zeros else None
        for half in range(2):
            words = [
                load(builder, codes, (half * _OCTETS + octet) * ROW_BYTES, _WORDS)
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
