"""Buffers beside a protected page: an access outside the buffer kills the process at once."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
from numpy.typing import NDArray

_libc = ctypes.CDLL(None, use_errno=True)
_PROT_NONE = 0


def guarded(data: bytes | int, *, is_at_end: bool) -> NDArray[np.uint8]:
    """A copy of `data`, or that many bytes of 0xA5, right before or after a protected page."""
    num_bytes = data if isinstance(data, int) else len(data)
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, size + 2 * mmap.PAGESIZE), np.uint8)
    for start in (0, mmap.PAGESIZE + size):
        page = ctypes.c_void_p(memory.ctypes.data + start)
        if _libc.mprotect(page, mmap.PAGESIZE, _PROT_NONE) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    first = mmap.PAGESIZE + (size - num_bytes if is_at_end else 0)
    buffer = memory[first : first + num_bytes]
    buffer[:] = 0xA5 if isinstance(data, int) else np.frombuffer(data, np.uint8)
    return buffer
