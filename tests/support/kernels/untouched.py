"""Zeros in memory that the system gives when it is touched: an 8B model takes none."""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch import Tensor

LARGE = 1 << 20  # bytes
MAP_NORESERVE = 0x4000  # Linux's value; `mmap` names it from Python 3.13 on
FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE

_zeros, _empty = torch.zeros, torch.empty


def untouched_zeros(
    *size: Any, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> Tensor:
    """Returns zeros like `torch.zeros`, but the memory of large ones is allocated when it is first
    touched.
    """
    shape = torch.Size(size if len(size) != 1 or isinstance(size[0], int) else size[0])
    dtype = dtype or torch.get_default_dtype()
    num_bytes = shape.numel() * dtype.itemsize
    kind = torch.device(device or torch.get_default_device()).type
    if kind == "meta":  # torch makes its zeros with `torch.empty`
        return _empty(shape, dtype=dtype, device=device, **options)
    is_on_cpu = kind == "cpu"
    if options or num_bytes < LARGE or not is_on_cpu:
        return _zeros(shape, dtype=dtype, device=device, **options)
    memory = mmap.mmap(-1, num_bytes, flags=FLAGS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
