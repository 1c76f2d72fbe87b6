"""A plane of bytes, entropy-coded in chunks that know nothing of each other.

    coded plane    length of each frame, uint32, little-endian [num_chunks]; the frames

A frame is Zstandard's (RFC 8878), of which only the literals' Huffman code is wanted: exponents do
not repeat, and every match that is found costs more than its literals would. No parameter of the
library says so. A hash table of 64 entries and matches of 7 bytes at least find hardly any, and one
of 128 KiB has a code of its own: 1 to 2.5 % above the entropy, where the same library's levels are
9 to 70 % above it. Of what else was tried on exponents, Huffman codes of zlib-ng decode at a sixth
of its speed (at three fifths with ISA-L), constriction's ANS coder at a fortieth.
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
    """What is stored is not what was written."""


class _Coders(threading.local):
    """A thread's own: they keep state from one call to the next."""

    def __init__(self) -> None:
        self.encoder = zstandard.ZstdCompressor(compression_params=_LITERALS_ONLY)
        self.decoder = zstandard.ZstdDecompressor()


_coders = _Coders()


def num_chunks(num_bytes: int) -> int:
    return -(-num_bytes // CHUNK_BYTES)


def encode_plane(plane: Bytes, executor: Executor) -> list[bytes]:
    """The coded plane in pieces."""

    def encode(start: int) -> bytes:
        return _coders.encoder.compress(plane[start : start + CHUNK_BYTES].data)

    frames = list(executor.map(encode, range(0, plane.size, CHUNK_BYTES)))
    lengths = np.array([len(frame) for frame in frames], "<u4")
    return [lengths.tobytes(), *frames]


def frames_of(coded: Bytes, num_bytes: int) -> Sequence[Bytes]:
    """The frames of a coded plane that had `num_bytes`. Raises NotDecodable."""
    table_bytes = 4 * num_chunks(num_bytes)
    if coded.size < table_bytes:
        raise NotDecodable("the lengths of its chunks are cut off")
    lengths = np.frombuffer(coded[:table_bytes].tobytes(), "<u4").astype(np.int64)
    if table_bytes + int(lengths.sum()) != coded.size:
        raise NotDecodable("the lengths of its chunks are not those stored")
    ends = table_bytes + np.cumsum(lengths)
    return [coded[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def decode_frame(frame: Bytes, num_bytes: int) -> Bytes:
    """The plane's bytes of one chunk, read-only. Raises NotDecodable."""
    try:
        if zstandard.frame_content_size(frame.data) != num_bytes:
            raise NotDecodable("a chunk says another size than its tensor's")
        plain = _coders.decoder.decompress(
            frame.data, max_output_size=num_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise NotDecodable(f"a chunk cannot be decoded: {error}") from None
    if len(plain) != num_bytes:
        raise NotDecodable("a chunk has another size than it says")
    return np.frombuffer(plain, np.uint8)
