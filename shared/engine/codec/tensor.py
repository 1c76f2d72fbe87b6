"""A tensor's bytes as planes, and back.

BF16 and FP16 are split into two planes of one byte per weight; each plane is coded if that saves
bytes. A tensor without a coded plane is stored unchanged, like every other dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from shared.engine.codec.byte_planes import BF16, FP16, Bytes, WordPlanes, byte_counts, entropy_bits
from shared.engine.codec.huffman import (
    CHUNK_BYTES,
    NotDecodable,
    decode_frame,
    encode_plane,
    frames_of,
    num_chunks,
)

AS_IS = "none"
UNSPLIT = "whole"  # the one plane of an unchanged tensor
SPLITS = {split.codec: split for split in (BF16, FP16)}
_SPLIT_OF_DTYPE = {split.dtype: split for split in (BF16, FP16)}
# Decoding costs time: a plane is coded only below this entropy, and a tensor is split only if that
# saves more bytes than its entries in the file take.
MAX_CODED_ENTROPY_BITS = 7.75
MIN_SAVED_BYTES = 512


@dataclass(frozen=True, slots=True)
class EncodedPlane:
    name: str
    is_coded: bool
    parts: Sequence[bytes | memoryview]

    @property
    def num_bytes(self) -> int:
        return sum(len(part) for part in self.parts)


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """An encoded tensor. `entropy_bytes` is its size with an ideal bytewise code of the coded
    planes.
    """

    codec: str
    planes: tuple[EncodedPlane, ...]
    entropy_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(plane.num_bytes for plane in self.planes)


def encode_tensor(data: Bytes, dtype: str, executor: Executor) -> EncodedTensor:
    """Encodes `data` [num_bytes], whose `dtype` is a safetensors name."""
    split = _SPLIT_OF_DTYPE.get(dtype)
    if split is None or data.size % 2:
        return _as_is(data)
    planes, entropies = _split(data, split, executor)
    is_coded = [bits < MAX_CODED_ENTROPY_BITS for bits in entropies]
    bound_bits = sum(
        bits if coded else 8.0 for bits, coded in zip(entropies, is_coded, strict=True)
    )
    entropy_bytes = math.ceil(data.size // 2 * bound_bits / 8)
    if data.size - entropy_bytes < MIN_SAVED_BYTES:
        return _as_is(data)
    encoded = tuple(
        EncodedPlane(name, coded, encode_plane(plane, executor) if coded else [plane.data])
        for name, plane, coded in zip(split.names, planes, is_coded, strict=True)
    )
    if data.size - sum(plane.num_bytes for plane in encoded) < MIN_SAVED_BYTES:
        return _as_is(data)
    return EncodedTensor(split.codec, encoded, entropy_bytes)


def _as_is(data: Bytes) -> EncodedTensor:
    return EncodedTensor(AS_IS, (EncodedPlane(UNSPLIT, False, [data.data]),), data.size)


def _split(
    data: Bytes, split: WordPlanes, executor: Executor
) -> tuple[tuple[Bytes, Bytes], tuple[float, float]]:
    """Returns both planes, and the entropy of each in bits per byte."""
    low, high = (np.empty(data.size // 2, np.uint8) for _ in range(2))

    def split_chunk(start: int) -> tuple[np.ndarray, np.ndarray]:
        chunk = slice(start, min(start + CHUNK_BYTES, low.size))
        words = data[2 * chunk.start : 2 * chunk.stop].view(np.uint16)
        # Data in a file may start at an odd address.
        split.split(np.require(words, requirements="A"), low[chunk], high[chunk])
        return byte_counts(low[chunk]), byte_counts(high[chunk])

    counts = np.zeros((2, 256), np.int64)
    for pair in executor.map(split_chunk, range(0, low.size, CHUNK_BYTES)):
        counts += np.stack(pair)
    return (low, high), (entropy_bits(counts[0]), entropy_bits(counts[1]))


def plane_names(codec: str) -> tuple[str, ...]:
    """Returns the names of a tensor's planes. Raises NotDecodable for a codec that this version
    does not support.
    """
    if codec == AS_IS:
        return (UNSPLIT,)
    if codec not in SPLITS:
        raise NotDecodable(f"codec {codec!r} is not supported by this version")
    return SPLITS[codec].names


def decode_tensor(
    codec: str,
    stored: Mapping[str, Bytes],
    coded_planes: Sequence[str],
    out: Bytes,
    executor: Executor,
) -> None:
    """Fills `out` [num_bytes], which is aligned for its words. Raises NotDecodable."""
    names = plane_names(codec)
    if codec == AS_IS:
        data = stored[UNSPLIT]
        if data.size != out.size:
            raise NotDecodable(f"{data.size} bytes are stored instead of {out.size}")
        out[:] = data
        return
    if out.size % 2:
        raise NotDecodable(f"{out.size} bytes are not a multiple of 2")
    words = out.view(np.uint16)
    low, high = (_PlaneReader(stored[name], name in coded_planes, words.size) for name in names)

    def join_chunk(index: int) -> None:
        target = words[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        SPLITS[codec].join(low.chunk(index), high.chunk(index), target)

    for _ in executor.map(join_chunk, range(low.num_chunks)):
        pass


class _PlaneReader:
    """Reads the chunks of a stored plane."""

    def __init__(self, stored: Bytes, is_coded: bool, num_bytes: int) -> None:
        """Raises NotDecodable."""
        if not is_coded and stored.size != num_bytes:
            raise NotDecodable(f"{stored.size} bytes are stored instead of {num_bytes}")
        self._frames = frames_of(stored, num_bytes) if is_coded else None
        self._stored = stored
        self._num_bytes = num_bytes
        self.num_chunks = num_chunks(num_bytes)

    def chunk(self, index: int) -> Bytes:
        start = index * CHUNK_BYTES
        end = min(start + CHUNK_BYTES, self._num_bytes)
        if self._frames is None:
            return self._stored[start:end]
        return decode_frame(self._frames[index], end - start)
