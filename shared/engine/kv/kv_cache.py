"""The paged KV cache of a model: one tensor for all layers.

Within a block the head dimension precedes the token dimension, so that a gather of a sequence's
blocks yields contiguous operands of a GEMM for each head, without another copy.

On the CPU the tensor lies in anonymous memory: a page takes memory once it is written, and no more
once it is given back. So a cache is allocated at the largest size that it may get.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from shared.errors import ConfigError
from shared.kv_layout import KvLayout

_MADV_DONTNEED = getattr(mmap, "MADV_DONTNEED", None)


def allocate_kv_cache(kv_layout: KvLayout, num_blocks: int, device: torch.device) -> Tensor:
    """[num_slots, planes, num_blocks, heads, block_size, dim], zeroed. Raises ConfigError for more
    than the address space holds, and RuntimeError on other devices.
    """
    planes, heads, dim = kv_layout.state.row
    shape = (kv_layout.num_slots, planes, num_blocks, heads, kv_layout.block_size, dim)
    dtype = getattr(torch, kv_layout.dtype)
    if device.type != "cpu" or num_blocks == 0 or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags)
    except OSError as error:
        raise ConfigError(f"a KV cache of {num_bytes} bytes: {error.strerror}") from None
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


def release_blocks(kv_cache: Tensor, block_ids: Iterable[int]) -> None:
    """Gives the pages that lie completely in these blocks back to the system; they are zeros from
    then on. Does nothing on other devices, and on systems whose pages would keep their content.
    """
    if kv_cache.device.type != "cpu" or _MADV_DONTNEED is None or sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    block_bytes = kv_cache.stride(2) * kv_cache.element_size()
    for first, end in _runs(sorted(block_ids)):
        for plane in kv_cache.flatten(0, 1):
            start, length = _full_pages(plane.data_ptr(), first * block_bytes, end * block_bytes)
            if length and madvise(start, length, _MADV_DONTNEED):
                code = ctypes.get_errno()
                raise OSError(code, f"madvise of {length} bytes of the KV cache failed")


def _full_pages(base: int, first: int, end: int) -> tuple[int, int]:
    """Address and length of the pages within bytes [first, end) after `base`."""
    start = -(-(base + first) // mmap.PAGESIZE) * mmap.PAGESIZE
    return start, max(0, (base + end) // mmap.PAGESIZE * mmap.PAGESIZE - start)


def _runs(block_ids: list[int]) -> Iterator[tuple[int, int]]:
    """[first, end) of consecutive ids."""
    first = 0
    for index, block_id in enumerate(block_ids, 1):
        if index == len(block_ids) or block_ids[index] != block_id + 1:
            yield block_ids[first], block_id + 1
            first = index
