"""Memory through which bytes of files pass on their way to a tensor.

To a device they go through a ring of pinned slots: readers fill some while the device copies from
others, and nobody waits for a copy but the reader that gets its slot next.

    free ──reader takes──> filled by preadv ──send──> copied by the device ──event──> free
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

NUM_SLOTS, SLOT_BYTES = 8, 32 << 20
# Bytes read at once, so that they stay in the processor's cache until they are copied
LOCAL_BYTES = 1 << 20
LEAST_READERS, MOST_READERS = 4, 8

Wait = Callable[[], object]


class Slot(Protocol):
    memory: Tensor  # [num_bytes] uint8 on the CPU

    def send(self, staged: Tensor, out: Tensor) -> None:
        """Copies `staged`, a view of `memory`, to `out`, of the same shape and any dtype. The copy
        may end later, before whatever the device is given afterwards begins.
        """
        ...


class WeightStaging(Protocol):
    num_bytes: int  # size of a slot

    @contextmanager
    def slot(self) -> Iterator[Slot]: ...

    def close(self) -> None: ...


class LocalStaging:
    """A new slot for each use; copies have ended when `send` returns."""

    num_bytes = LOCAL_BYTES

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        yield _LocalSlot(torch.empty(self.num_bytes, dtype=torch.uint8))

    def close(self) -> None: ...


class _LocalSlot:
    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    def send(self, staged: Tensor, out: Tensor) -> None:
        out.copy_(staged)


class StagingRing:
    """A ring of slots. `record` is called after a copy has begun, and returns a function that waits
    for its end.
    """

    def __init__(
        self, slots: list[Tensor], record: Callable[[], Wait], num_bytes: int = SLOT_BYTES
    ) -> None:
        """The slots are [num_bytes] uint8 each."""
        self.num_bytes = num_bytes
        self._num_slots = len(slots)
        self._free: SimpleQueue[_RingSlot] = SimpleQueue()
        for memory in slots:
            self._free.put(_RingSlot(memory, record))

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """The slot that is free for longest. Waits until it is, and its copy has ended."""
        slot = self._free.get()
        try:
            slot.wait()
            yield slot
        finally:
            self._free.put(slot)

    def close(self) -> None:
        """Waits for all copies, and drops the slots. No reader may hold or take one."""
        for _ in range(self._num_slots):
            self._free.get().wait()


class _RingSlot:
    def __init__(self, memory: Tensor, record: Callable[[], Wait]) -> None:
        self.memory = memory
        self._record = record
        self._pending: list[Wait] = []

    def send(self, staged: Tensor, out: Tensor) -> None:
        out.copy_(staged, non_blocking=True)
        self._pending.append(self._record())

    def wait(self) -> None:
        while self._pending:
            self._pending.pop()()


def pinned_ring(device: torch.device) -> StagingRing:
    """Returns a ring to a CUDA device; to the CPU, whose copies are synchronous, of plain
    memory.
    """
    is_cuda = device.type == "cuda"
    slots = [
        torch.empty(SLOT_BYTES, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(NUM_SLOTS)
    ]
    return StagingRing(slots, _recorded_event if is_cuda else lambda: _no_wait)


def num_readers() -> int:
    return min(MOST_READERS, max(LEAST_READERS, os.cpu_count() or 1))


def _recorded_event() -> Wait:
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def _no_wait() -> None: ...
