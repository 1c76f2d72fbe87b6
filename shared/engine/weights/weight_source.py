"""Sources of weights: safetensors files, bundles, or seeded numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from shared.engine.parallel.cuts import WHOLE, Cut

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorInfo(NamedTuple):
    """The properties of a tensor that need no reading; `dtype` is a safetensors name."""

    dtype: str
    shape: tuple[int, ...]


class Content(msgspec.Struct, frozen=True):
    """The identity of a tensor: `dtype` (a safetensors name), shape, xxh3-128 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


class WeightSource(Protocol):
    """Tensors by name. All methods but `names` and `files` raise CheckpointError with the file and
    the tensor. `read_into` may be called from several threads.
    """

    def names(self) -> list[str]: ...

    def files(self) -> list[Path]:
        """Returns all files that determine the tensors."""
        ...

    def path(self, name: str) -> Path: ...
    def info(self, name: str) -> TensorInfo: ...
    def content(self, name: str) -> Content: ...

    def read_into(self, name: str, cut: Cut, out: Tensor) -> None:
        """Fills `out`, of the shape of the cut, converted to its dtype and moved to its device.

        Only the bytes of the cut are read, except from a bundle: its checksums are of whole
        tensors. Raises ValueError for a cut or an `out` that does not fit.
        """
        ...

    def row_cuts(self, name: str) -> Sequence[Cut]:
        """Returns the tensor, in cuts by rows that are read as cheaply as the whole: several
        readers share a large one.
        """
        ...


def check_part(name: str, full: tuple[int, ...], cut: Cut, out: Tensor) -> None:
    """Raises ValueError unless `out` has the shape of the cut of a tensor of shape `full`."""
    expected = cut.shape(full)
    if tuple(out.shape) != expected:
        raise ValueError(f"tensor {name}: the cut has shape {expected}, not {tuple(out.shape)}")


def read_tensor(source: WeightSource, name: str) -> Tensor:
    """Returns a tensor in its own dtype. Raises CheckpointError."""
    dtype, shape = source.info(name)
    found = torch.empty(shape, dtype=DTYPES[dtype])
    source.read_into(name, WHOLE, found)
    return found
