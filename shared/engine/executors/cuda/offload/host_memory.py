"""Memory of the host that a device copies to and from at its full speed."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

Lock = Callable[[memoryview], Callable[[], None] | None]  # as of `PageLock`
PIECE_BYTES = 256 << 20


class HostMemory:
    """Anonymous memory, page-locked in pieces; no copy may reach from one into the next. Where one
    cannot be locked it stays pageable, with all after it: copies of these take longer.
    """

    def __init__(self, num_bytes: int, lock: Lock, *, piece_bytes: int = PIECE_BYTES) -> None:
        """Raises OSError if there is no such memory."""
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError, AttributeError):  # few large pages are locked sooner
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = memoryview(memory)
        self._unlocks: list[Callable[[], None]] = []
        self.pieces: list[Tensor] = []  # [num_bytes] uint8 each
        for first in range(0, num_bytes, piece_bytes):
            piece = whole[first : first + piece_bytes]
            unlock = lock(piece) if len(self._unlocks) == len(self.pieces) else None
            if unlock is not None:
                self._unlocks.append(unlock)
            self.pieces.append(torch.frombuffer(piece, dtype=torch.uint8))

    @property
    def is_locked(self) -> bool:
        return len(self._unlocks) == len(self.pieces)

    def close(self) -> None:
        """Unlocks the memory, which no copy may use any more."""
        while self._unlocks:
            self._unlocks.pop()()
        self.pieces.clear()
