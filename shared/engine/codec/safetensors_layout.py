"""The byte layout of a safetensors file.

    header length, uint64, little-endian; header, JSON; the tensors' bytes, without a gap

The safetensors library returns tensors without their offsets, and no header text; both are needed
to restore a file byte by byte.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from shared.engine.codec.byte_planes import Bytes
from shared.errors import CheckpointError
from shared.tokenizer.checkpoint_file import MAX_TENSOR_LIST_BYTES, open_checkpoint_file
from shared.transport.wire_errors import UNREADABLE, one_line

LENGTH = struct.Struct("<Q")
METADATA = "__metadata__"
ITEM_BYTES = {  # dtypes whose sizes are checked; others are not
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("BF16", "F16", "U16", "I16"), 2),
    **dict.fromkeys(("F32", "U32", "I32"), 4),
    **dict.fromkeys(("F64", "U64", "I64"), 8),
}
_Offset = Annotated[int, msgspec.Meta(ge=0)]


class ByteSpan(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[_Offset, ...]
    data_offsets: tuple[_Offset, _Offset]

    @property
    def num_bytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


class SafetensorsHeader(msgspec.Struct, frozen=True):
    """The header of a safetensors file. `spans` are in the order of their bytes."""

    text: str
    spans: dict[str, ByteSpan]
    metadata: dict[str, str]

    @property
    def data_start(self) -> int:
        return LENGTH.size + len(self.text.encode())

    @property
    def num_data_bytes(self) -> int:
        return max((span.data_offsets[1] for span in self.spans.values()), default=0)


class MappedFile:
    """A mapped safetensors file; its arrays are read-only, and each keeps the mapping alive."""

    def __init__(self, path: Path, header: SafetensorsHeader, data: Bytes) -> None:
        self.path = path
        self.header = header
        self._data = data

    def bytes_of(self, name: str) -> Bytes:
        """[num_bytes]"""
        start, end = self.header.spans[name].data_offsets
        return self._data[start:end]


def parse_header(encoded: bytes) -> SafetensorsHeader:
    """Parses a header. Raises ValueError with a message of one line."""
    try:
        text = encoded.decode()
        fields = msgspec.json.decode(text, type=dict[str, Any])
        metadata = msgspec.convert(fields.pop(METADATA, {}), dict[str, str])
        spans = msgspec.convert(fields, dict[str, ByteSpan])
    except UNREADABLE as error:
        raise ValueError(f"its header cannot be read: {one_line(error)}") from None
    ordered = dict(sorted(spans.items(), key=lambda each: each[1].data_offsets))
    end = 0
    for name, span in ordered.items():
        if span.data_offsets[0] != end or span.num_bytes < 0:
            raise ValueError(f"tensor {name} does not follow the one before it")
        item_bytes = ITEM_BYTES.get(span.dtype)
        if item_bytes is not None and span.num_bytes != item_bytes * math.prod(span.shape):
            raise ValueError(f"tensor {name} has {span.num_bytes} bytes, not those of its shape")
        end = span.data_offsets[1]
    return SafetensorsHeader(text, ordered, metadata)


def map_safetensors(path: Path) -> MappedFile:
    """Maps a file into memory. Raises OSError, and CheckpointError, which names the tensor if only
    a tensor is cut off.
    """
    with open_checkpoint_file(path) as file:
        start = file.read(LENGTH.size)
        length = LENGTH.unpack(start)[0] if len(start) == LENGTH.size else 0
        encoded = file.read(min(length, MAX_TENSOR_LIST_BYTES))
        if not encoded or len(encoded) != length:
            raise CheckpointError(f"{path}: incomplete safetensors file: its header is cut off")
        try:
            header = parse_header(encoded)
        except ValueError as error:
            raise CheckpointError(f"{path}: not a safetensors file: {error}") from None
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    data = np.frombuffer(memory, np.uint8)[header.data_start :]
    if data.size > header.num_data_bytes:
        raise CheckpointError(f"{path}: there are bytes after the last tensor")
    for name, span in header.spans.items():
        if span.data_offsets[1] > data.size:
            raise CheckpointError(f"{path}: incomplete safetensors file: tensor {name} is cut off")
    return MappedFile(path, header, data)
