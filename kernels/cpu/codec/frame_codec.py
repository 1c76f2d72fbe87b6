"""The loops of the KV codec, whose format shared/engine/kv/kv_codec.py describes."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.codec.bf16_codec import (
    BLOCK,
    LANES,
    RECORD_BYTES,
    WINDOW,
    decode_block,
    encode_block,
)
from kernels.cpu.compile import compiled

BLOCK_WORDS = BLOCK * BLOCK  # words that share a base
BLOCK_BYTES = 2 * BLOCK_WORDS
_ROW_BYTES = 2 * BLOCK
_SAMPLED_EVERY = 5  # samples every fifth word to choose a base; odd, or it would miss channels
_NUM_MAGNITUDES = 128  # values of an upper byte without its sign
_REACH = BLOCK_WORDS + LANES  # no block reads further than this into the verbatim bytes


@compiled()
def encode_frame(payload: Any, out: Any) -> int:
    """Returns the bytes written to `out`, or 0 if they would not be fewer than the payload's."""
    num_blocks = payload.size // BLOCK_BYTES
    tail = payload[num_blocks * BLOCK_BYTES :]
    bases = np.empty(LANES, np.uint8)
    counts = np.empty((2, _NUM_MAGNITUDES), np.int64)
    verbatim = num_blocks * (1 + RECORD_BYTES)
    start = out.ctypes.data
    for block in range(num_blocks):
        if verbatim + BLOCK_WORDS + tail.size > out.size:
            return 0
        words = payload[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        out[block] = _base_of(words, counts)
        bases[:] = out[block]
        record = start + num_blocks + block * RECORD_BYTES
        end = encode_block(
            np.int64(words.ctypes.data),
            _ROW_BYTES,
            np.int64(bases.ctypes.data),
            0,
            np.int64(record),
            np.int64(start + verbatim),
        )
        verbatim = end - start
    num_bytes = verbatim + tail.size
    if num_bytes >= payload.size:
        return 0
    _copy(tail, out[verbatim:num_bytes])
    return num_bytes


@compiled()
def _copy(source: Any, target: Any) -> None:
    """Copies arrays of equal size element by element: numba's slice assignment would compile its
    error path, 1 s.
    """
    for i in range(source.size):
        target[i] = source[i]


@compiled()
def _base_of(words: Any, counts: Any) -> int:
    """The base that leaves the fewest of the sampled words verbatim."""
    counts[:] = 0
    for upper in range(1, BLOCK_BYTES, 2 * _SAMPLED_EVERY):
        counts[words[upper] >> 7, words[upper] & 0x7F] += 1
    best, best_count = 0, -1
    for base in range(_NUM_MAGNITUDES - WINDOW + 1):
        count = counts[0, base]
        for above in range(1, WINDOW):
            count += counts[0, base + above] + counts[1, base + above]
        if count > best_count:
            best, best_count = base, count
    return best


@compiled()
def decode_frame(coded: Any, out: Any) -> bool:
    """Fills `out`. Returns False if `coded` is not the encoding of any payload."""
    num_blocks = out.size // BLOCK_BYTES
    num_tail = out.size - num_blocks * BLOCK_BYTES
    first, end = num_blocks * (1 + RECORD_BYTES), coded.size - num_tail
    if first > end:
        return False
    bases = np.empty(LANES, np.uint8)
    # Codes can require more verbatim bytes than `coded` has: near its end a copy is read instead.
    near_end = np.zeros(2 * _REACH, np.uint8)
    num_near = min(end - first, _REACH)
    _copy(coded[end - num_near : end], near_end[:num_near])
    start, is_near = coded.ctypes.data, False
    verbatim, limit = start + first, start + end
    for block in range(num_blocks):
        if not is_near and limit - verbatim <= num_near:
            verbatim = near_end.ctypes.data + num_near - (limit - verbatim)
            limit, is_near = near_end.ctypes.data + num_near, True
        if verbatim > limit:
            return False
        bases[:] = coded[block]
        verbatim = decode_block(
            np.int64(start + num_blocks + block * RECORD_BYTES),
            np.int64(verbatim),
            np.int64(bases.ctypes.data),
            0,
            np.int64(out[block * BLOCK_BYTES :].ctypes.data),
            _ROW_BYTES,
        )
    _copy(coded[end:], out[out.size - num_tail :])
    return verbatim == limit
