"""16-bit floating-point words as two planes of bytes: one stored uncompressed, one entropy-coded.

    BF16  seeee eeee mmm mmmm  ->  sign_mantissa  smmm mmmm      exponents       eeee eeee
    FP16  seee eemm mmmm mmmm  ->  low_mantissa   mmmm mmmm      sign_exponents  seee eemm

The exponents of trained weights carry about 2.6 bits. In FP16 they share their byte with the sign
and two bits of mantissa, without loss: a Huffman code of the complete byte takes as many bits as a
code of the exponent plus three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.host_codec import count_bytes, join_bf16, join_fp16, split_bf16, split_fp16

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class WordPlanes:
    """The split of words of one dtype; `names` are the names of the low and the high plane."""

    codec: str
    dtype: str
    names: tuple[str, str]
    split: Callable[[Words, Bytes, Bytes], None]
    join: Callable[[Bytes, Bytes, Words], None]


BF16 = WordPlanes("bf16-huffman", "BF16", ("sign_mantissa", "exponents"), split_bf16, join_bf16)
FP16 = WordPlanes("fp16-huffman", "F16", ("low_mantissa", "sign_exponents"), split_fp16, join_fp16)


def byte_counts(plane: Bytes) -> NDArray[np.int64]:
    """Returns the number of occurrences of each byte value, [256]."""
    counts = np.zeros((4, 256), np.int64)
    count_bytes(plane, counts)
    return counts.sum(axis=0)


def entropy_bits(counts: NDArray[np.int64]) -> float:
    """Returns the Shannon entropy of one byte: -sum p log2 p, from 0 to 8 bits."""
    share = counts[counts > 0] / max(1, int(counts.sum()))
    return float(-(share * np.log2(share)).sum()) if len(share) else 0.0
