"""16-bit floating-point words as two planes of bytes: one to keep, one to code.

    BF16  seeee eeee mmm mmmm  ->  sign_mantissa  smmm mmmm      exponents       eeee eeee
    FP16  seee eemm mmmm mmmm  ->  low_mantissa   mmmm mmmm      sign_exponents  seee eemm

The exponents of trained weights carry about 2.6 bits. In FP16 they share their byte with the sign
and two bits of mantissa, which cost nothing there: a Huffman code of the whole byte takes as many
bits as one of the exponent and three more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.compile import compiled

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint16]


@compiled()
def _split_bf16(words: Words, low: Bytes, high: Bytes) -> None:
    for i in range(words.size):
        word = words[i]
        low[i] = ((word >> np.uint16(8)) & np.uint16(0x80)) | (word & np.uint16(0x7F))
        high[i] = (word >> np.uint16(7)) & np.uint16(0xFF)


@compiled()
def _join_bf16(low: Bytes, high: Bytes, words: Words) -> None:
    for i in range(words.size):
        kept = np.uint16(low[i])
        sign = (kept & np.uint16(0x80)) << np.uint16(8)
        words[i] = sign | (np.uint16(high[i]) << np.uint16(7)) | (kept & np.uint16(0x7F))


@compiled()
def _split_fp16(words: Words, low: Bytes, high: Bytes) -> None:
    for i in range(words.size):
        low[i] = words[i] & np.uint16(0xFF)
        high[i] = words[i] >> np.uint16(8)


@compiled()
def _join_fp16(low: Bytes, high: Bytes, words: Words) -> None:
    for i in range(words.size):
        words[i] = (np.uint16(high[i]) << np.uint16(8)) | np.uint16(low[i])


@compiled()
def _count(plane: Bytes, counts: NDArray[np.int64]) -> None:
    """Four rows of counters, since equal neighbours would wait for one another's."""
    num_whole = plane.size // 4 * 4
    for i in range(0, num_whole, 4):
        for row in range(4):
            counts[row, plane[i + row]] += 1
    for i in range(num_whole, plane.size):
        counts[0, plane[i]] += 1


@dataclass(frozen=True, slots=True)
class WordPlanes:
    """How words of one dtype are split; `names` are those of the low and of the high plane."""

    codec: str
    dtype: str
    names: tuple[str, str]
    split: Callable[[Words, Bytes, Bytes], None]
    join: Callable[[Bytes, Bytes, Words], None]


BF16 = WordPlanes("bf16-huffman", "BF16", ("sign_mantissa", "exponents"), _split_bf16, _join_bf16)
FP16 = WordPlanes(
    "fp16-huffman", "F16", ("low_mantissa", "sign_exponents"), _split_fp16, _join_fp16
)


def byte_counts(plane: Bytes) -> NDArray[np.int64]:
    """How often each byte occurs, [256]."""
    counts = np.zeros((4, 256), np.int64)
    _count(plane, counts)
    return counts.sum(axis=0)


def entropy_bits(counts: NDArray[np.int64]) -> float:
    """Of one byte, by Shannon: -sum p log2 p, in 0 to 8."""
    share = counts[counts > 0] / max(1, int(counts.sum()))
    return float(-(share * np.log2(share)).sum()) if len(share) else 0.0
