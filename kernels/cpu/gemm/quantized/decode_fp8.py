"""Decodes a tile of FP8 E4M3, see kernels/quantized_weight.py, to BF16 pairs [16, 32, 2].

All numbers of a block have one scale, so a table of the 128 magnitudes times the scale, rounded to
BF16, decodes it: an instruction looks up 64 bytes in 128 (VPERMI2B of AVX-512 VBMI).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.codec.bf16_codec import LANE_OF
from kernels.cpu.simd.intrinsics import bits_of_bf16

NUM_MAGNITUDES = 128
TABLE_BYTES = 2 * NUM_MAGNITUDES  # lower bytes, then upper ones
_REGISTER, _PAIRS = 64, 16
_I8, _I16, _I32, _I64, _F32 = *(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType()
_BYTES = ir.VectorType(_I8, _REGISTER)

_codes = torch.arange(NUM_MAGNITUDES, dtype=torch.uint8).view(torch.float8_e4m3fn)
MAGNITUDES = np.ascontiguousarray(_codes.float().numpy())


@intrinsic
def fill_table(_: Any, magnitudes: Any, scale: Any, table: Any) -> Any:
    """Stores the table of a scale; `magnitudes` and `table` are addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        magnitudes, scale, table = args
        kind = ir.VectorType(_F32, NUM_MAGNITUDES)
        numbers = _load(builder, magnitudes, 0, kind)
        one = builder.insert_element(ir.Constant(kind, ir.Undefined), scale, _I32(0))
        every_lane = ir.Constant(ir.VectorType(_I32, NUM_MAGNITUDES), [0] * NUM_MAGNITUDES)
        scales = builder.shuffle_vector(one, one, every_lane)
        halves = bits_of_bf16(builder, builder.fmul(numbers, scales))
        eight = ir.Constant(ir.VectorType(_I16, NUM_MAGNITUDES), [8] * NUM_MAGNITUDES)
        narrow = ir.VectorType(_I8, NUM_MAGNITUDES)
        _store(builder, builder.trunc(halves, narrow), table, 0)
        upper = builder.trunc(builder.lshr(halves, eight), narrow)
        _store(builder, upper, table, NUM_MAGNITUDES)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), generate


@intrinsic
def decode_fp8(_: Any, codes: Any, table: Any, out: Any) -> Any:
    """Stores a tile at `out`. All are addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes, table, out = args
        lows = [_load(builder, table, at, _BYTES) for at in (0, _REGISTER)]
        highs = [_load(builder, table, NUM_MAGNITUDES + at, _BYTES) for at in (0, _REGISTER)]
        signs = ir.Constant(_BYTES, [0x80] * _REGISTER)
        for pair in range(_PAIRS):
            code = _load(builder, codes, pair * _REGISTER, _BYTES)
            low = _looked_up(builder, lows, code)
            high = builder.xor(_looked_up(builder, highs, code), builder.and_(code, signs))
            for side in range(2):
                order = [each for lane in LANE_OF[side] for each in (lane, _REGISTER + lane)]
                mask = ir.Constant(ir.VectorType(_I32, _REGISTER), [int(each) for each in order])
                row = builder.shuffle_vector(low, high, mask)
                _store(builder, row, out, (2 * pair + side) * _REGISTER)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _looked_up(builder: Any, table: Sequence[Any], index: Any) -> Any:
    """Bytes of a table of 128 by the lower seven bits of each index."""
    name = "llvm.x86.avx512.vpermi2var.qi.512"
    function = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(_BYTES, [_BYTES] * 3), name
    )
    return builder.call(function, [table[0], index, table[1]])


def _load(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    place = builder.add(address, _I64(offset))
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=1)


def _store(builder: Any, vector: Any, address: Any, offset: int) -> None:
    place = builder.add(address, _I64(offset))
    builder.store(vector, builder.inttoptr(place, vector.type.as_pointer()), align=1)
