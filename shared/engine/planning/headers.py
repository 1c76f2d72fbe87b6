"""The names, dtypes and shapes of a checkpoint's tensors, without their data. No torch.

A safetensors file begins with the length of its header (uint64, little-endian) and the header, in
JSON. Only that and the file's size are read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple

import msgspec

from shared.engine.weights.checkpoint_index import (
    INDEX_FILE,
    SINGLE_FILE,
    file_names,
    read_index,
)
from shared.errors import CheckpointError
from shared.tokenizer.checkpoint_file import MAX_TENSOR_LIST_BYTES, open_checkpoint_file
from shared.transport.wire_errors import UNREADABLE, one_line

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("BF16", "F16", "U16", "I16"), 2),
    **dict.fromkeys(("F32", "U32", "I32"), 4),
    **dict.fromkeys(("F64", "U64", "I64"), 8),
}
_LENGTH = struct.Struct("<Q")
_Size = Annotated[int, msgspec.Meta(ge=0)]


class HeaderTensor(NamedTuple):
    """A tensor of a file. `start` is the position of its first byte."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class _HeaderEntry(msgspec.Struct):
    """A tensor, or the file's metadata, whose fields are any."""

    dtype: str = ""
    shape: tuple[_Size, ...] = ()
    data_offsets: tuple[_Size, _Size] = (0, 0)


def has_files(model_dir: Path) -> bool:
    return any((model_dir / name).exists() for name in (INDEX_FILE, SINGLE_FILE))


def stored_files(model_dir: Path) -> Iterator[list[HeaderTensor]]:
    """Returns the tensors of one file after the other. Raises CheckpointError for a file that is
    missing, cut off or contradicts the index.
    """
    index = read_index(model_dir)
    seen: dict[str, str] = {}
    for file_name in file_names(model_dir, index):
        path = model_dir / file_name
        tensors = file_tensors(path)
        names = {tensor.name for tensor in tensors}
        for name in names & seen.keys():
            raise CheckpointError(f"{path}: tensor {name} is also in {seen[name]}")
        seen |= dict.fromkeys(names, file_name)
        yield tensors
    for name, file_name in (index or {}).items():
        if seen.get(name) != file_name:
            path = model_dir / file_name
            raise CheckpointError(f"{path}: tensor {name} of {INDEX_FILE} is missing")


def file_tensors(path: Path) -> list[HeaderTensor]:
    """Returns the tensors of a file, from its header. Raises CheckpointError."""
    try:
        with open_checkpoint_file(path) as file:
            encoded = _header_text(file, path)
        entries = msgspec.json.decode(encoded, type=dict[str, _HeaderEntry])
        data_start = _LENGTH.size + len(encoded)
        data_bytes = path.stat().st_size - data_start
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except UNREADABLE as error:
        raise CheckpointError(f"{path}: its header cannot be read: {one_line(error)}") from None
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        _check_span(path, name, entry, data_bytes)
    return [
        HeaderTensor(path, name, each.dtype, each.shape, data_start + each.data_offsets[0])
        for name, each in entries.items()
    ]


def _header_text(file: BinaryIO, path: Path) -> bytes:
    start = file.read(_LENGTH.size)
    length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
    encoded = file.read(min(length, MAX_TENSOR_LIST_BYTES))
    if not encoded or len(encoded) != length:
        raise CheckpointError(f"{path}: incomplete safetensors file: its header is cut off")
    return encoded


def _check_span(path: Path, name: str, entry: _HeaderEntry, data_bytes: int) -> None:
    first, end = entry.data_offsets
    if entry.dtype not in ITEM_BYTES:
        raise CheckpointError(f"{path}: tensor {name}: dtype {entry.dtype!r} is not supported")
    num_bytes = prod(entry.shape) * ITEM_BYTES[entry.dtype]
    if end - first != num_bytes:
        raise CheckpointError(
            f"{path}: tensor {name} has {end - first} bytes, its shape requires {num_bytes}"
        )
    if end > data_bytes:
        raise CheckpointError(f"{path}: incomplete safetensors file: tensor {name} is cut off")
