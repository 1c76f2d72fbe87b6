"""Lossless compression of a frame's KV, the `FrameCodec` of `kv_wire`.

In trained models the exponents of KV carry about 2.6 bits, nearly the same in every layer, head and
channel, so one base for 1024 words is enough (measured: a base per channel saves a further 0.04
bits per word). BF16 is encoded like compressed weights, see kernels.cpu.codec.bf16_codec: 11.3 bits
per word, where the entropy of the upper bytes allows 10.9. FP16, whose upper bytes have five
exponent bits, and FP32 have no codec. A compressed frame:

    [num_blocks]               base of each block of 1024 words
    [num_blocks, RECORD_BYTES] records
    [any]                      verbatim bytes of all blocks, in order
    [0 to 2047]                the payload after the last full block, uncompressed
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernels.host_codec import (
    BLOCK_BYTES,
    decode_frame,
    encode_frame,
    first_frame,
    frame_codec_failure,
)
from shared.errors import DependencyUnavailable


class Bf16FrameCodec:
    """Codes frames of BF16. Both methods release the GIL, and are compiled before the
    first frame.
    """

    name = "bf16-high-bytes"

    def __init__(self) -> None:
        """Raises DependencyUnavailable on a host that cannot compile the codec."""
        failure = frame_codec_failure()
        if failure is not None:
            raise DependencyUnavailable(failure)
        with first_frame():
            payload, coded = memoryview(bytearray(BLOCK_BYTES)), memoryview(bytearray(BLOCK_BYTES))
            num_bytes = self.encode(payload, coded)
            self.decode(coded[:num_bytes], payload)

    def encode(self, payload: memoryview, out: memoryview) -> int:
        """Returns the bytes written to `out`, or 0 if they would not be fewer than the payload's.

        `out` is as long as the payload.
        """
        return int(encode_frame(_bytes(payload), _bytes(out)))

    def decode(self, coded: memoryview, out: memoryview) -> bool:
        """Fills `out`, which has the payload's length; False if no payload encodes to `coded`."""
        return bool(decode_frame(_bytes(coded), _bytes(out)))


def _bytes(view: memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(view, np.uint8)
