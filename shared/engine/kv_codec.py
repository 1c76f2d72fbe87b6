"""KV of a frame in fewer bytes, bit for bit: what `kv_wire` asks of a `FrameCodec`.

Of trained models the exponents of KV carry about 2.6 bits, nearly the same in every layer, head and
channel, so one base for 1024 words serves (measured: a base for each channel saves 0.04 bits a word
more). BF16 goes as weights do in memory, see kernels.cpu.codec.bf16_codec: 11.3 bits a word
where the entropy of its upper bytes allows 10.9. FP16, of whose upper bytes five bits are
exponent, and FP32 have no codec. A coded frame:

    [num_blocks]               base of each block of 1024 words
    [num_blocks, RECORD_BYTES] records
    [any]                      verbatim bytes of all blocks, in their order
    [0 to 2047]                the payload behind the last whole block, as it is
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.codec.bf16_codec import (
    BLOCK,
    LANES,
    RECORD_BYTES,
    WINDOW,
    decode_block,
    encode_block,
)
from kernels.cpu.compile import compile_lock, compiled

BLOCK_WORDS = BLOCK * BLOCK
BLOCK_BYTES = 2 * BLOCK_WORDS
_ROW_BYTES = 2 * BLOCK
_SAMPLED_EVERY = 5  # of the words that a base is chosen by; odd, or it would miss channels
_NUM_MAGNITUDES = 128  # of an upper byte without its sign
_REACH = BLOCK_WORDS + LANES  # no block reads further into the verbatim bytes


class Bf16FrameCodec:
    """For BF16. Both methods leave Python's lock, and are compiled before the first frame."""

    name = "bf16-high-bytes"

    def __init__(self) -> None:
        with compile_lock():
            plain, coded = memoryview(bytearray(BLOCK_BYTES)), memoryview(bytearray(BLOCK_BYTES))
            num_bytes = self.encode(plain, coded)
            self.decode(coded[:num_bytes], plain)

    def encode(self, payload: memoryview, out: memoryview) -> int:
        """Bytes written to `out`, or 0 if they would not be fewer than the payload's.

        `out` is as long as the payload.
        """
        return int(_encode(_bytes(payload), _bytes(out)))

    def decode(self, coded: memoryview, out: memoryview) -> bool:
        """Fills `out`, as long as the payload was; False if no payload gives `coded`."""
        return bool(_decode(_bytes(coded), _bytes(out)))


def _bytes(view: memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(view, np.uint8)


@compiled()
def _encode(payload: Any, out: Any) -> int:
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
    out[verbatim:num_bytes] = tail
    return num_bytes


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
def _decode(coded: Any, out: Any) -> bool:
    num_blocks = out.size // BLOCK_BYTES
    num_tail = out.size - num_blocks * BLOCK_BYTES
    first, end = num_blocks * (1 + RECORD_BYTES), coded.size - num_tail
    if first > end:
        return False
    bases = np.empty(LANES, np.uint8)
    # Codes may ask for more verbatim bytes than came: near the end they are read from a copy.
    near_end = np.zeros(2 * _REACH, np.uint8)
    num_near = min(end - first, _REACH)
    near_end[:num_near] = coded[end - num_near : end]
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
    out[out.size - num_tail :] = coded[end:]
    return verbatim == limit
