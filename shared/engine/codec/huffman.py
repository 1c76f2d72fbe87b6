"""A plane of bytes, entropy-coded in independent chunks.

    coded plane    length of each frame, uint32, little-endian [num_chunks]; the frames

A frame is a Zstandard frame (RFC 8878), used only for its Huffman code of literals: exponents do
not repeat, and every match costs more than its literals. The library has no parameter to disable
matches. With a hash table of 64 entries and a minimum match of 7 bytes it finds hardly any, and
each block of 128 KiB has a separate code: 1 to 2.5 % above the entropy, where the library's levels
are 9 to 70 % above it. Of the alternatives measured on exponents, zlib-ng's Huffman codes decode at
a sixth of this speed (three fifths with ISA-L), constriction's ANS coder at a fortieth.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np
import zstandard

from shared.engine.codec.byte_planes import Bytes

CHUNK_BYTES = 1 << 18
_LITERALS_ONLY = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    write_content_size=True,
)


class NotDecodable(ValueError):
    """The stored bytes are damaged."""


class _Coders(threading.local):
    """One encoder and decoder per thread, because they have state between calls."""

    def __init__(self) -> None:
        self.encoder = zstandard.ZstdCompressor(compression_params=_LITERALS_ONLY)
        self.decoder = zstandard.ZstdDecompressor()


_coders = _Coders()


def num_chunks(num_bytes: int) -> int:
    return -(-num_bytes // CHUNK_BYTES)


def encode_plane(plane: Bytes, executor: Executor) -> list[bytes]:
    """Returns the coded plane as a list: the table of lengths, then the frames."""

    def encode(start: int) -> bytes:
        return _coders.encoder.compress(plane[start : start + CHUNK_BYTES].data)

    frames = list(executor.map(encode, range(0, plane.size, CHUNK_BYTES)))
    lengths = np.array([len(frame) for frame in frames], "<u4")
    return [lengths.tobytes(), *frames]


def frames_of(coded: Bytes, num_bytes: int) -> Sequence[Bytes]:
    """Returns the frames of a coded plane that had `num_bytes`. Raises NotDecodable."""
    table_bytes = 4 * num_chunks(num_bytes)
    if coded.size < table_bytes:
        raise NotDecodable("the table of chunk lengths is cut off")
    lengths = np.frombuffer(coded[:table_bytes].tobytes(), "<u4").astype(np.int64)
    if table_bytes + int(lengths.sum()) != coded.size:
        raise NotDecodable("the chunk lengths do not add up to the stored size")
    ends = table_bytes + np.cumsum(lengths)
    return [coded[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def decode_frame(frame: Bytes, num_bytes: int) -> Bytes:
    """Returns the plane's bytes of one chunk, read-only. Raises NotDecodable."""
    try:
        if zstandard.frame_content_size(frame.data) != num_bytes:
            raise NotDecodable("a chunk's header states another size than the tensor's")
        decoded = _coders.decoder.decompress(
            frame.data, max_output_size=num_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise NotDecodable(f"a chunk cannot be decoded: {error}") from None
    if len(decoded) != num_bytes:
        raise NotDecodable("a chunk has another size than its header states")
    return np.frombuffer(decoded, np.uint8)
