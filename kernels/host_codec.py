"""Codecs that run on the host's CPU, for any device that a model uses: bundles and KV frames.

Their loops are compiled. numba is imported by the first call, so that a worker that reads an
uncompressed checkpoint and sends its KV uncompressed never loads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint16]

BLOCK_BYTES = 2 * 32 * 32  # bytes of the words of a KV frame that share a base


def split_bf16(words: Words, low: Bytes, high: Bytes) -> None:
    """words [n] -> low [n] sign and mantissa, high [n] exponents."""
    from kernels.cpu.codec import byte_planes

    byte_planes.split_bf16(words, low, high)


def join_bf16(low: Bytes, high: Bytes, words: Words) -> None:
    """The inverse of `split_bf16`."""
    from kernels.cpu.codec import byte_planes

    byte_planes.join_bf16(low, high, words)


def split_fp16(words: Words, low: Bytes, high: Bytes) -> None:
    """words [n] -> low [n] lower bytes, high [n] upper bytes."""
    from kernels.cpu.codec import byte_planes

    byte_planes.split_fp16(words, low, high)


def join_fp16(low: Bytes, high: Bytes, words: Words) -> None:
    """The inverse of `split_fp16`."""
    from kernels.cpu.codec import byte_planes

    byte_planes.join_fp16(low, high, words)


def count_bytes(plane: Bytes, counts: NDArray[np.int64]) -> None:
    """Adds the counts of plane [n] to counts [4, 256], whose rows are to be summed."""
    from kernels.cpu.codec import byte_planes

    byte_planes.count(plane, counts)


def frame_codec_failure() -> str | None:
    """Returns the reason that this host cannot encode frames; None if it can."""
    from kernels.cpu import probe

    return probe.frames_failure()


@contextmanager
def first_frame() -> Iterator[None]:
    """Surrounds the first frame of a process. One process of a host compiles the codec under a
    lock; later ones find its code, and wait for no process that compiles something else.
    """
    from kernels.cpu import probe
    from kernels.cpu.compile import cache_dir, compile_lock

    marker = Path(cache_dir(), f"compiled-frames-{probe.target_key()}")
    if marker.exists():
        yield
        return
    with compile_lock():
        yield
    with suppress(OSError):
        marker.touch()


def encode_frame(payload: Bytes, out: Bytes) -> int:
    """Returns the bytes written to `out`, or 0 if they would not be fewer than the payload's.

    `out` is as long as the payload.
    """
    from kernels.cpu.codec import frame_codec

    return int(frame_codec.encode_frame(payload, out))


def decode_frame(coded: Bytes, out: Bytes) -> bool:
    """Fills `out`, as long as the payload. Returns False if `coded` is invalid."""
    from kernels.cpu.codec import frame_codec

    return bool(frame_codec.decode_frame(coded, out))
