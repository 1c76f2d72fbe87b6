"""Tiles of a split weight (kernels/split_weight.py), decoded in registers.

A tile of bytes of `exponents` gives two tiles of weights, the first and the second halves of its
groups. Ten 32-bit instructions, two of them multiplications, process four weights at a time: one
byte permutation copies a weight's sign and mantissa to both bytes of its 16 bits, and one bit
selection puts its exponent between them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.device import IS_INTERPRETED
from kernels.split_weight import GROUP, HALF, WORD_GROUPS

_IS_INTERPRETED = tl.constexpr(IS_INTERPRETED)
_GROUP, _HALF = tl.constexpr(GROUP), tl.constexpr(HALF)
_WORD_GROUPS = tl.constexpr(WORD_GROUPS)

# The steps decode four weights: $2 has their signs and mantissas, $3 and $4 the lower and the upper
# bits of the codes of both halves, a byte each; $5 and $6 the exponent bits of the base, and $0 and
# $1 the weights, 16 bits each. code = lower | upper << 4; code · 128 + base has the exponent in
# bits 7 to 14 and may carry into bit 15; bit 15 and the mantissa come from the other operand.
_LAST_STEPS = """
prmt.b32 first, code, 0, 0x4140;
prmt.b32 second, code, 0, 0x4342;
mad.lo.u32 first, first, 128, $5;
mad.lo.u32 second, second, 128, $6;
prmt.b32 code, $2, 0, 0x1100;
lop3.b32 $0, code, first, 0x807f807f, 0xe4;
prmt.b32 code, $2, 0, 0x3322;
lop3.b32 $1, code, second, 0x807f807f, 0xe4;
}
"""
FIRST_HALF = (
    """
{
.reg .b32 code, first, second;
shl.b32 code, $4, 4;
lop3.b32 code, $3, code, 0x0f0f0f0f, 0xe4;
"""
    + _LAST_STEPS
)
SECOND_HALF = (
    """
{
.reg .b32 code, first, second;
shr.u32 code, $3, 4;
lop3.b32 code, code, $4, 0x0f0f0f0f, 0xe4;
"""
    + _LAST_STEPS
)
CONSTRAINTS = "=r,=r,r,r,r,r,r"
_FIRST_HALF, _SECOND_HALF = tl.constexpr(FIRST_HALF), tl.constexpr(SECOND_HALF)
_CONSTRAINTS = tl.constexpr(CONSTRAINTS)


@triton.jit
def weight_index(byte):
    """The index in K of the first half's weight of a byte of codes; the other is at index + 32."""
    return byte // _HALF * _GROUP + byte % _HALF


@triton.jit
def first_half(sign_mantissa, lower, upper, base_bits):
    """u8 [N, BYTES], base << 7 as i16 [N, 1] -> BF16 [N, BYTES]"""
    if _IS_INTERPRETED:
        code = (lower & 15) | (upper << 4)
        return _join_fields(sign_mantissa, code, base_bits)
    # Not declared pure: otherwise the tensor cores' operand would get a layout for bytes, and the
    # product's sum would differ from that with the dense weight.
    bits = tl.inline_asm_elementwise(
        _FIRST_HALF,
        _CONSTRAINTS,
        [sign_mantissa, lower, upper, base_bits],
        dtype=tl.int16,
        is_pure=False,
        pack=4,
    )
    return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def second_half(sign_mantissa, lower, upper, base_bits):
    """Computes the other weight of each byte, with the operands of `first_half`."""
    if _IS_INTERPRETED:
        code = (lower >> 4) | (upper & 0xF0)
        return _join_fields(sign_mantissa, code, base_bits)
    bits = tl.inline_asm_elementwise(
        _SECOND_HALF,
        _CONSTRAINTS,
        [sign_mantissa, lower, upper, base_bits],
        dtype=tl.int16,
        is_pure=False,
        pack=4,
    )
    return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def _join_fields(sign_mantissa, code, base_bits):
    """The same computation as the inline assembly."""
    rest = sign_mantissa.to(tl.int16)
    exponent = (code.to(tl.int16) << 7) + base_bits
    bits = ((rest & 0x80) << 8) | (exponent & 0x7F80) | (rest & 0x7F)
    return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def join_halves(first, second, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """[ROWS, BYTES] twice -> [ROWS, 2 · BYTES] in the order of K; only renames registers."""
    both = tl.join(first, second).reshape(ROWS, BYTES // _HALF, _HALF, 2)
    return both.permute(0, 1, 3, 2).reshape(ROWS, 2 * BYTES)


@triton.jit
def upper_codes(
    is_wide_ptr,
    wide_start_ptr,
    wide_exponents_ptr,
    row,
    first_group,
    num_words,
    BYTES: tl.constexpr,
):
    """The upper four bits of codes as u8 [N, BYTES], from `first_group` on, in rows `row` [N].

    A mostly masked load: most groups are not wide, and give zeros. Branching around it would cost
    more, as would waiting for it: it is in flight with the other loads of its step. The groups must
    be in one word of bits.
    """
    word_index = first_group // _WORD_GROUPS
    place = row.to(tl.int64) * num_words + word_index  # [N]
    word, start = tl.load(is_wide_ptr + place)[:, None], tl.load(wide_start_ptr + place)[:, None]
    group = first_group - word_index * _WORD_GROUPS + tl.arange(0, BYTES // _HALF)[None, :]
    is_wide = ((word >> group) & 1) == 1  # [N, groups]
    slot = (start + _count_bits(word & ((1 << group) - 1))).to(tl.int64)
    byte = tl.arange(0, _HALF)[None, None, :]
    upper_ptr = wide_exponents_ptr + slot[:, :, None] * _HALF + byte  # [N, groups, HALF]
    upper = tl.load(upper_ptr, mask=is_wide[:, :, None] & (byte >= 0), other=0)
    return upper.reshape(row.shape[0], BYTES)


@triton.jit
def _count_bits(x):
    """The number of set bits of non-negative i32."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x += x >> 8
    return (x + (x >> 16)) & 0x3F
