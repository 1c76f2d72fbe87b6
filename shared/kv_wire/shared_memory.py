"""KV within one host: payloads are in a memfd that the receiver owns and the sender maps.

The memory belongs to one connection and is sealed against resizing; the kernel frees it when both
processes have unmapped it, even after a crash. Pages are allocated when a frame first uses them, so
a small model uses little of the mapping, and the last used slot is reused first. A lock of the
pages allocates all of them, when the link is made.

    slot: free ──fill──▶ filled ──Frame──▶ receiver's ──Ack, Refusal──▶ free
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
from collections.abc import Callable
from functools import partial

from shared.background import start_awaited
from shared.clock import Clock
from shared.errors import LinkLost
from shared.kv_wire.checked_copy import copy_and_checksum, copy_and_sum, grown, zero
from shared.kv_wire.expected_pushes import ExpectedPushes, TakeCopy
from shared.kv_wire.frame_delivery import Arrival, FrameDelivery
from shared.kv_wire.frames import (
    Frame,
    Offer,
    ProtocolError,
    Record,
    sealed_sum,
)
from shared.kv_wire.link import (
    FRAME_BYTES,
    FRAMES_UNDER_WAY,
    MAX_FRAME_BYTES,
    FrameHeader,
    PageLock,
)
from shared.kv_wire.record_stream import RecordStream

NUM_SLOTS = 4
SLOT_BYTES = MAX_FRAME_BYTES
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create_memory(num_bytes: int) -> int:
    """Returns a sealed memfd of this size, without any page allocated. The caller closes it."""
    fd = os.memfd_create("hearth-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def check_memory(fd: int, num_bytes: int) -> None:
    """Raises ProtocolError unless the memory has this size and is sealed: no access can fault."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"the peer's file descriptor is not a memfd: {error}") from error
    if seals & fcntl.F_SEAL_SHRINK == 0 or os.fstat(fd).st_size != num_bytes:
        raise ProtocolError(f"the peer's memory is not a sealed memfd of {num_bytes} bytes")


def frames_under_way(frame_bytes: int, num_slots: int) -> int:
    """Returns how many frames of one push are sent at a time."""
    return FRAMES_UNDER_WAY if frame_bytes <= FRAME_BYTES else num_slots - 1


class PageLockedMap(mmap.mmap):
    """A mapping that ends with the last view of it: copies in progress hold one. Its pages, if
    they are locked, are unlocked just before.
    """

    unlock: Callable[[], None] | None = None

    def lock(self, page_lock: PageLock) -> bool:
        """Returns whether the pages are locked."""
        self.unlock = page_lock.lock(memoryview(self))
        return self.unlock is not None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


def allocate_locked(page_lock: PageLock, num_bytes: int) -> memoryview:
    """Returns private memory, page-locked if possible."""
    mapped = PageLockedMap(-1, num_bytes)
    mapped.lock(page_lock)
    return memoryview(mapped)


class _Slots:
    """The slots of one end. No view of them may be made after `close`."""

    def __init__(self, fd: int, num_slots: int, slot_bytes: int, access: int) -> None:
        self.mapped = PageLockedMap(fd, num_slots * slot_bytes, access=access)
        self._slot_bytes = slot_bytes

    def view(self, slot_index: int, num_bytes: int) -> memoryview:
        start = slot_index * self._slot_bytes
        return memoryview(self.mapped)[start : start + num_bytes]

    def close(self) -> None:
        del self.mapped


class SharedMemoryStaging:
    """The sender's side of the memory. Frames have `frame_bytes`, but not if the slots are to be
    page-locked and cannot be: a device then copies by way of a small buffer.
    """

    def __init__(
        self,
        fd: int,
        num_slots: int,
        slot_bytes: int,
        page_lock: PageLock | None = None,
        *,
        frame_bytes: int = FRAME_BYTES,
    ) -> None:
        check_memory(fd, num_slots * slot_bytes)
        self.num_slots, self.max_frame_bytes = num_slots, slot_bytes
        self._slots = _Slots(fd, num_slots, slot_bytes, mmap.ACCESS_WRITE)
        is_pageable = page_lock is not None and not self._slots.mapped.lock(page_lock)
        self.frame_bytes = FRAME_BYTES if is_pageable else frame_bytes
        self.frames_under_way = frames_under_way(self.frame_bytes, num_slots)

    def view(self, slot_index: int, num_bytes: int) -> memoryview:
        return self._slots.view(slot_index, num_bytes)

    def transmit(
        self, stream: RecordStream, frame_id: int, header: FrameHeader, slot_index: int
    ) -> None:
        stream.send(Frame(frame_id, header, slot_index))

    def close(self) -> None:
        self._slots.close()


class SharedMemoryReception:
    """The receiver's end: copies out of a slot into one private buffer, summing the copy.

    With a `page_lock` each slot has such a buffer, from which a device copies. Threads fill them
    as frames arrive, while the device copies from others.
    """

    def __init__(
        self,
        placements: ExpectedPushes,
        clock: Clock,
        fd: int,
        num_slots: int,
        slot_bytes: int,
        page_lock: PageLock | None = None,
        *,
        peer_region: str = "",
    ) -> None:
        self._slots = _Slots(fd, num_slots, slot_bytes, mmap.ACCESS_READ)
        self._num_slots, self._slot_bytes = num_slots, slot_bytes
        self._page_lock = page_lock
        self._private = [memoryview(b"")] * num_slots
        self._held_slots: set[int] = set()
        self._copies: dict[int, asyncio.Task[int]] = {}  # the last one of each slot
        self.stream = RecordStream(self)
        self.deliveries = FrameDelivery(
            placements, self.stream, clock, peer_region, max_frame_bytes=slot_bytes
        )
        self.deliveries.task.add_done_callback(lambda _: self._close())

    def record_arrived(self, record: Record) -> None:
        if isinstance(record, Offer):
            self.deliveries.offered(record)
            return
        if not isinstance(record, Frame) or record.slot_index is None or record.codec:
            raise ProtocolError(f"a sender does not send {type(record).__name__} here")
        slot_index = record.slot_index
        if not 0 <= slot_index < self._num_slots or slot_index in self._held_slots:
            raise ProtocolError(f"slot {slot_index} does not exist or is in use")
        self.deliveries.announce(record)
        self._held_slots.add(slot_index)
        take_copy: TakeCopy = partial(self._take_copy, slot_index, record.header)
        if self._page_lock is not None:
            take_copy = self._copied_ahead(slot_index, record.header, self._page_lock)
        release = partial(self._release, slot_index, record.header)
        drop = self._drop if self._page_lock is None else release
        self.deliveries.add(Arrival(record, take_copy, release, drop))

    def _release(self, slot_index: int, header: FrameHeader, is_private: bool) -> None:
        """The sender zeroes the slot itself."""
        if is_private:
            self._zero(slot_index, header.payload_bytes)
        self._held_slots.discard(slot_index)

    def _drop(self, is_private: bool) -> None:
        """Does nothing: without a lock of pages a frame is copied when it is delivered."""

    def _zero(self, slot_index: int, num_bytes: int) -> None:
        """Zeroes the copy of a frame: of one that was rejected, perhaps once it has been made."""
        copying = self._copies.get(slot_index)
        copy = self._private[0 if self._page_lock is None else slot_index][:num_bytes]
        if copying is None or copying.done():
            zero(copy)
        else:
            copying.add_done_callback(lambda _: zero(copy))

    def payload_arrived(self, checksum: int) -> None:
        raise ProtocolError("payloads are not sent on this connection")

    def ended(self, error: LinkLost) -> None:
        self.deliveries.end(error)

    async def _take_copy(self, slot_index: int, header: FrameHeader) -> tuple[memoryview, int]:
        num_bytes = header.payload_bytes
        self._private[0] = grown(self._private[0], num_bytes)
        copy = self._private[0][:num_bytes]
        payload_sum = await copy_and_checksum(copy, self._slots.view(slot_index, num_bytes))
        return copy, sealed_sum(header, payload_sum)

    def _copied_ahead(self, slot_index: int, header: FrameHeader, page_lock: PageLock) -> TakeCopy:
        """Starts to copy once the slot's last copy has ended, which a rejection does not await."""
        if not self._private[slot_index]:  # in its final size: a lock may wait for the device
            self._private[slot_index] = allocate_locked(page_lock, self._slot_bytes)
        copy = self._private[slot_index][: header.payload_bytes]
        source = self._slots.view(slot_index, header.payload_bytes)
        to_sum = partial(copy_and_sum, copy, source, page_lock.copy)
        summed = start_awaited(_after(self._copies.get(slot_index), to_sum))
        self._copies[slot_index] = summed

        async def take_copy() -> tuple[memoryview, int]:
            return copy, sealed_sum(header, await summed)

        return take_copy

    def _close(self) -> None:
        self._slots.close()
        self._private.clear()


async def _after(last: asyncio.Task[int] | None, function: Callable[[], int]) -> int:
    """Calls a function on a thread."""
    if last is not None:
        await asyncio.wait((last,))
    return await asyncio.to_thread(function)
