"""Compiles the loops of KV frames in a process of its own and codes a frame: see probe.py."""

from __future__ import annotations

import sys

import numpy as np

from kernels.cpu.codec.frame_codec import BLOCK_BYTES, decode_frame, encode_frame

NUM_BYTES = 2 * BLOCK_BYTES  # one block alone would not be shorter


def main() -> int:
    """Returns 0 if a frame is decoded to what was encoded."""
    payload, coded, decoded = np.zeros((3, NUM_BYTES), np.uint8)
    payload[1::2] = 63  # the upper bytes of small numbers
    num_bytes = encode_frame(payload, coded)
    is_valid = num_bytes > 0 and decode_frame(coded[:num_bytes], decoded)
    return int(not (is_valid and np.array_equal(decoded, payload)))


if __name__ == "__main__":
    sys.exit(main())
