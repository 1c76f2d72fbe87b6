"""Reads parts of the tensors of a safetensors file, and no other bytes of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import FileIO
from math import prod

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from shared.engine.parallel.cuts import WHOLE, Cut
from shared.engine.weights.reading.staging import LOCAL_BYTES, Slot, WeightStaging


class _Offsets(msgspec.Struct, frozen=True):
    data_offsets: tuple[int, int]


class TensorBytes:
    """Reads a safetensors file: the length of a JSON header, the header, the data.

    Format: https://github.com/huggingface/safetensors#format.
    """

    def __init__(self, file: FileIO, staging: WeightStaging) -> None:
        self._file = file
        self._staging = staging
        length = int.from_bytes(self._read(0, 8), "little")
        header = msgspec.json.decode(self._read(8, length), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        offsets = {
            name: msgspec.json.decode(entry, type=_Offsets).data_offsets
            for name, entry in header.items()
        }
        self._starts = {name: 8 + length + first for name, (first, _) in offsets.items()}
        self._sizes = {name: end - first for name, (first, end) in offsets.items()}

    def read_into(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], cut: Cut, out: Tensor
    ) -> None:
        """Fills `out`, which has the shape of the cut. Raises KeyError, and OSError for a file that
        ends before the tensor does.
        """
        if not shape:
            with self._staging.slot() as slot:
                self._send(slot, self._starts[name], dtype.itemsize, dtype, out.view(1, 1))
            return
        row_bytes = prod(shape[1:]) * dtype.itemsize
        first, num_bytes = _span(shape, cut, row_bytes)
        for rows, at in _row_blocks(shape, cut, num_bytes, self._staging.num_bytes):
            part = out[at : at + len(rows)]
            start = self._starts[name] + rows.start * row_bytes + first
            with self._staging.slot() as slot:
                self._send(slot, start, row_bytes, dtype, part)

    def size(self, name: str) -> int:
        """Returns the number of bytes. Raises KeyError."""
        return self._sizes[name]

    def digest(self, name: str) -> str:
        """Returns the xxh3-128 in hex of the tensor's bytes. Raises like `read_into`."""
        digest, at = xxhash.xxh3_128(), self._starts[name]
        end = at + self._sizes[name]
        piece = np.empty(LOCAL_BYTES, np.uint8)
        while at < end:
            read = piece[: min(LOCAL_BYTES, end - at)]
            self._read_exactly(read, at)
            digest.update(read.data)
            at += len(read)
        return digest.hexdigest()

    def _send(self, slot: Slot, start: int, stride: int, dtype: torch.dtype, part: Tensor) -> None:
        """Rows that begin `stride` bytes apart in the file, to `part` [R, ...]."""
        num_bytes, memory = part.numel() * dtype.itemsize, slot.memory
        if not num_bytes:
            return
        if num_bytes > len(memory):  # one row is longer than a slot
            memory = torch.empty(num_bytes, dtype=torch.uint8)
        staged = memory[:num_bytes].view(dtype).view(part.shape)
        self._fill(staged.view(len(part), -1), start, stride)
        slot.send(staged, part)

    def _fill(self, staged: Tensor, start: int, stride: int) -> None:
        """[R, ...] rows that begin `stride` bytes apart in the file."""
        rows = staged.view(torch.uint8).numpy()
        if rows.shape[1] == stride:
            self._read_exactly(rows, start)
            return
        for index, row in enumerate(rows):
            self._read_exactly(row, start + index * stride)

    def _read_exactly(self, out: NDArray[np.uint8], start: int) -> None:
        """Network file systems may return less at once."""
        data, at = out.reshape(-1).data, 0
        while at < len(data):
            count = os.preadv(self._file.fileno(), [data[at:]], start + at)
            if not count:
                raise OSError("the file ends before the tensor does")
            at += count

    def _read(self, start: int, count: int) -> bytes:
        return os.pread(self._file.fileno(), count, start)


def row_cuts(shape: tuple[int, ...], num_bytes: int, most_bytes: int) -> list[Cut]:
    """Cuts a tensor of `num_bytes` into rows of `most_bytes` at most, or of one row."""
    if num_bytes <= most_bytes or not shape:
        return [WHOLE]
    blocks = _row_blocks(shape, WHOLE, num_bytes // shape[0], most_bytes)
    return [Cut(((rows.start, rows.stop),)) for rows, _ in blocks]


def _span(shape: tuple[int, ...], cut: Cut, row_bytes: int) -> tuple[int, int]:
    """Returns the bytes of each row that belong to the cut: first, number."""
    if cut.columns is None:
        return 0, row_bytes
    column_bytes = row_bytes // shape[1] if shape[1] else 0
    first, end = cut.columns
    return first * column_bytes, (end - first) * column_bytes


def _row_blocks(
    shape: tuple[int, ...], cut: Cut, num_bytes: int, most_bytes: int
) -> Iterator[tuple[range, int]]:
    """Runs of rows of the tensor, of `most_bytes` or one row, and the row of the part at which each
    begins. A row of the part has `num_bytes`.
    """
    at_once = max(1, most_bytes // max(1, num_bytes))
    at = 0
    for first, end in ((0, shape[0]),) if cut.rows is None else cut.rows:
        for start in range(first, end, at_once):
            rows = range(start, min(end, start + at_once))
            yield rows, at
            at += len(rows)
