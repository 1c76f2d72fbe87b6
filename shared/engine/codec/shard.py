"""One safetensors file of a bundle: the planes of each tensor as U8 tensors, `NAME.PLANE`.

Its metadata repeats its record in the manifest, so that a finished shard of an unfinished bundle
can be distinguished from a shard of another checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import xxhash

from shared.engine.codec.byte_planes import Bytes
from shared.engine.codec.huffman import NotDecodable
from shared.engine.codec.manifest import ManifestTensor, StoredShard, check_shard
from shared.engine.codec.safetensors_layout import LENGTH, METADATA, MappedFile, map_safetensors
from shared.engine.codec.tensor import (
    EncodedTensor,
    decode_tensor,
    encode_tensor,
    plane_names,
)
from shared.errors import CheckpointError
from shared.transport.wire_errors import UNREADABLE

RECORD = "hearth_shard"
WORD_BYTES = 8  # headers of the safetensors library end at a multiple of it
OnBytes = Callable[[int], None]


def checksum(data: Bytes) -> str:
    """Returns the xxh3-128 in hex."""
    return xxhash.xxh3_128_hexdigest(data.data)


def stored_name(tensor: str, plane: str) -> str:
    """Returns the unique name of a plane: no plane's name ends with a dot and another plane's
    name.
    """
    return f"{tensor}.{plane}"


class BundleShard:
    """An open shard, mapped into memory; tensors are decoded on demand."""

    def __init__(self, path: Path, record: StoredShard, executor: Executor) -> None:
        """Raises CheckpointError with the name of a truncated or missing tensor."""
        self.path = path
        self.record = record
        self.tensors = {tensor.name: tensor for tensor in record.tensors}
        self._executor = executor
        self._file = _mapped(path)
        for tensor in record.tensors:
            missing = [each for each in self._planes(tensor) if each not in self._file.header.spans]
            if missing:
                raise CheckpointError(f"{path}: tensor {tensor.name}: there is no {missing[0]}")

    def decode(self, name: str, out: Bytes) -> None:
        """Fills `out` [num_bytes], aligned for its dtype, with the tensor's original bytes.

        Raises CheckpointError with the tensor's name if the stored bytes are damaged.
        """
        tensor = self.tensors[name]
        planes = zip(plane_names(tensor.codec), self._planes(tensor), strict=True)
        stored = {plane: self._file.bytes_of(full_name) for plane, full_name in planes}
        try:
            decode_tensor(tensor.codec, stored, tensor.coded_planes, out, self._executor)
        except NotDecodable as error:
            raise CheckpointError(f"{self.path}: tensor {name}: damaged: {error}") from None
        if checksum(out) != tensor.digest:
            raise CheckpointError(f"{self.path}: tensor {name}: damaged: its checksum differs")

    def original_bytes(self, name: str) -> Bytes:
        """Returns the original bytes of a tensor as a new NumPy array [num_bytes]. Raises
        CheckpointError.
        """
        num_bytes = self.tensors[name].num_bytes
        try:
            out = np.empty(num_bytes, np.uint8)
        except (MemoryError, ValueError):
            raise CheckpointError(
                f"{self.path}: tensor {name}: no memory for {num_bytes} bytes"
            ) from None
        self.decode(name, out)
        return out

    def _planes(self, tensor: ManifestTensor) -> list[str]:
        try:
            planes = plane_names(tensor.codec)
        except NotDecodable as error:
            raise CheckpointError(f"{self.path}: tensor {tensor.name}: {error}") from None
        return [stored_name(tensor.name, plane) for plane in planes]


def read_record(path: Path) -> StoredShard:
    """Returns the record in a shard's metadata. Raises CheckpointError."""
    said = _mapped(path).header.metadata.get(RECORD)
    if said is None:
        raise CheckpointError(f"{path}: not a shard of a bundle")
    try:
        record = msgspec.json.decode(said, type=StoredShard)
    except UNREADABLE as error:
        raise CheckpointError(f"{path}: not a shard of a bundle: {error}") from None
    check_shard(path, record)
    return record


def write_shard(
    file: IO[bytes], source: MappedFile, path: str, executor: Executor, on_bytes: OnBytes
) -> StoredShard:
    """Encodes a safetensors file, whose path is `path`, one tensor at a time. Raises OSError.

    The header is written last, because only then the lengths of the planes are known: into space
    reserved for it, padded with spaces.
    """
    num_reserved = _reserved_bytes(source, path)
    file.seek(LENGTH.size + num_reserved)
    spans: dict[str, dict[str, object]] = {}
    tensors, offset = [], 0
    for name, span in source.header.spans.items():
        data = source.bytes_of(name)
        digest = executor.submit(checksum, data)
        encoded = encode_tensor(data, span.dtype, executor)
        for plane in encoded.planes:
            for part in plane.parts:
                file.write(part)
            end = offset + plane.num_bytes
            spans[stored_name(name, plane.name)] = _u8_span(offset, end)
            offset = end
        tensors.append(_stored(source, name, digest.result(), encoded))
        on_bytes(span.num_bytes)
    record = StoredShard(path=path, header=source.header.text, tensors=tuple(tensors))
    file.seek(0)
    file.write(LENGTH.pack(num_reserved) + _encoded_header(record, spans).ljust(num_reserved))
    return record


def original_parts(shard: BundleShard) -> Iterator[bytes | memoryview]:
    """Returns the bytes of the original safetensors file, in order."""
    header = shard.record.header.encode()
    yield LENGTH.pack(len(header)) + header
    for tensor in shard.record.tensors:
        yield shard.original_bytes(tensor.name).data


def _mapped(path: Path) -> MappedFile:
    try:
        return map_safetensors(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None


def _stored(source: MappedFile, name: str, digest: str, encoded: EncodedTensor) -> ManifestTensor:
    span = source.header.spans[name]
    return ManifestTensor(
        name=name,
        dtype=span.dtype,
        shape=span.shape,
        num_bytes=span.num_bytes,
        digest=digest,
        codec=encoded.codec,
        coded_planes=tuple(plane.name for plane in encoded.planes if plane.is_coded),
        num_stored_bytes=encoded.num_bytes,
        entropy_bytes=encoded.entropy_bytes,
    )


def _u8_span(start: int, end: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}


def _encoded_header(record: StoredShard, spans: dict[str, dict[str, object]]) -> bytes:
    said = msgspec.json.encode(record).decode()
    return msgspec.json.encode({METADATA: {RECORD: said}, **spans})


def _reserved_bytes(source: MappedFile, path: str) -> int:
    """Returns the size of the longest possible header: two planes per tensor, all
    numbers at full width.
    """
    widest, digest = 10**15, "0" * 32
    spans: dict[str, dict[str, object]] = {}
    tensors = []
    for name, span in source.header.spans.items():
        planes = ("x" * 16, "y" * 16)
        spans |= {stored_name(name, plane): _u8_span(widest, 2 * widest) for plane in planes}
        tensors.append(
            ManifestTensor(
                name=name,
                dtype=span.dtype,
                shape=span.shape,
                num_bytes=span.num_bytes,
                digest=digest,
                codec="x" * 16,
                coded_planes=planes,
                num_stored_bytes=widest,
                entropy_bytes=widest,
            )
        )
    record = StoredShard(path=path, header=source.header.text, tensors=tuple(tensors))
    num_bytes = len(_encoded_header(record, spans)) + WORD_BYTES
    return num_bytes - (LENGTH.size + num_bytes) % WORD_BYTES
