"""16-bit words as two planes of bytes, and back: see shared/engine/codec/byte_planes.py.

Words are uint16 [n], planes uint8 [n].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.compile import compiled


@compiled()
def split_bf16(words: Any, low: Any, high: Any) -> None:
    for i in range(words.size):
        word = words[i]
        low[i] = ((word >> np.uint16(8)) & np.uint16(0x80)) | (word & np.uint16(0x7F))
        high[i] = (word >> np.uint16(7)) & np.uint16(0xFF)


@compiled()
def join_bf16(low: Any, high: Any, words: Any) -> None:
    for i in range(words.size):
        kept = np.uint16(low[i])
        sign = (kept & np.uint16(0x80)) << np.uint16(8)
        words[i] = sign | (np.uint16(high[i]) << np.uint16(7)) | (kept & np.uint16(0x7F))


@compiled()
def split_fp16(words: Any, low: Any, high: Any) -> None:
    for i in range(words.size):
        low[i] = words[i] & np.uint16(0xFF)
        high[i] = words[i] >> np.uint16(8)


@compiled()
def join_fp16(low: Any, high: Any, words: Any) -> None:
    for i in range(words.size):
        words[i] = (np.uint16(high[i]) << np.uint16(8)) | np.uint16(low[i])


@compiled()
def count(plane: Any, counts: Any) -> None:
    """Counts bytes in four rows of counters: increments of one counter wait for each other."""
    num_whole = plane.size // 4 * 4
    for i in range(0, num_whole, 4):
        for row in range(4):
            counts[row, plane[i + row]] += 1
    for i in range(num_whole, plane.size):
        counts[0, plane[i]] += 1
