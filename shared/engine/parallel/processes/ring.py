"""A ring of slots in a memfd: one process writes records, others read each of them in order.

    memory: number of slots written | slots taken, for each reader | slots

A reader checks for some microseconds, then sleeps on its eventfd, which an event loop can watch
too. The writer never overwrites a slot that a reader has not taken. Pickle is never used: a record
is bytes.
"""

from __future__ import annotations

import os
import select
import time

import msgspec

from shared.engine.parallel.processes.records import (
    HEADER,
    Assembly,
    Part,
    Record,
    RingError,
    decode_part,
    encode_parts,
    num_parts_of,
)
from shared.engine.parallel.transport.shared_words import (
    LINE_BYTES,
    SPINS,
    create_memory,
    map_memory,
)

PAUSE_S = 0.0002  # pause between checks of a full ring
TORN_S = 0.01  # how long a slot may take to become visible after its number


class RingFull(RuntimeError):
    """A reader has not taken its slots within the limit. `reader` is its index."""

    def __init__(self, reader: int, limit_s: float) -> None:
        super().__init__(f"reader {reader} of the ring has taken no slot for {limit_s:g} s")
        self.reader = reader


class RingFiles(msgspec.Struct, frozen=True):
    """File descriptors and sizes of a ring: what its processes share."""

    memory: int
    events: tuple[int, ...]  # an event for each reader
    num_slots: int
    slot_bytes: int

    @property
    def fds(self) -> tuple[int, ...]:
        return (self.memory, *self.events)

    @property
    def data_start(self) -> int:
        return (1 + len(self.events)) * LINE_BYTES

    @property
    def num_bytes(self) -> int:
        return self.data_start + self.num_slots * self.slot_bytes

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def create_ring(num_readers: int, num_slots: int = 64, slot_bytes: int = 64 * 1024) -> RingFiles:
    """Raises ValueError for sizes that hold nothing."""
    if num_readers < 1 or num_slots < 1 or slot_bytes <= HEADER.size:
        raise ValueError(f"{num_readers} readers, {num_slots} slots of {slot_bytes} bytes")
    flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
    events = tuple(os.eventfd(0, flags) for _ in range(num_readers))
    files = RingFiles(-1, events, num_slots, slot_bytes)
    return msgspec.structs.replace(files, memory=create_memory("hearth-ring", files.num_bytes))


class _Mapped:
    def __init__(self, files: RingFiles) -> None:
        self.files = files
        self._memory = map_memory(files.memory, files.num_bytes)
        self._bytes = memoryview(self._memory)
        self.counts = self._bytes[: files.data_start].cast("Q")  # 8 words a line

    def slot(self, number: int) -> memoryview:
        begin = self.files.data_start + number % self.files.num_slots * self.files.slot_bytes
        return self._bytes[begin : begin + self.files.slot_bytes]

    def num_taken(self, reader: int) -> int:
        return self.counts[(1 + reader) * (LINE_BYTES // 8)]

    def set_taken(self, reader: int, number: int) -> None:
        self.counts[(1 + reader) * (LINE_BYTES // 8)] = number

    def close(self) -> None:
        self.counts.release()
        self._bytes.release()
        self._memory.close()


class RingWriter:
    """Writes to a ring. It waits for a reader at most `limit_s`, then raises RingFull. A record may
    be larger than the ring: its last parts are written as the readers take the first ones.
    """

    def __init__(self, files: RingFiles, limit_s: float) -> None:
        self._ring = _Mapped(files)
        self._files = files
        self.limit_s = limit_s
        self._num_written = 0
        self._is_stopped = False

    def has_room(self, record: Record) -> bool:
        num_parts = num_parts_of(record, self._files.slot_bytes)
        return self._slowest(num_parts) is None

    def write(self, record: Record) -> None:
        """Writes a record. Raises RingFull; ValueError for a record of more parts than
        can be numbered.
        """
        for slot in encode_parts(record, self._num_written, self._files.slot_bytes):
            self._wait_until_free()
            self._ring.slot(self._num_written)[: len(slot)] = slot
            self._num_written += 1
            self._ring.counts[0] = self._num_written
            for event in self._files.events:
                os.eventfd_write(event, 1)

    def _wait_until_free(self) -> None:
        deadline = None
        while (reader := self._slowest()) is not None:
            deadline = deadline or time.monotonic() + self.limit_s
            if self._is_stopped or time.monotonic() > deadline:
                raise RingFull(reader, self.limit_s)
            time.sleep(PAUSE_S)

    def _slowest(self, num_slots: int = 1) -> int | None:
        """Returns the first reader that has not taken the slots to be written next."""
        needed = self._num_written + num_slots - self._files.num_slots
        readers = range(len(self._files.events))
        return next((each for each in readers if self._ring.num_taken(each) < needed), None)

    def stop(self) -> None:
        """Stops the writer, from any thread: a `write` that waits for a reader raises RingFull."""
        self._is_stopped = True

    def close(self) -> None:
        self._ring.close()


class RingReader:
    """Reader number `reader`. Raises RingError when the ring holds what no writer writes."""

    def __init__(self, files: RingFiles, reader: int) -> None:
        self._ring = _Mapped(files)
        self._reader = reader
        self._event = files.events[reader]
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)
        self._num_taken = 0
        self._assembly = Assembly(0)

    def fileno(self) -> int:
        """Returns a descriptor that is readable after a write, until `take` has found nothing."""
        return self._event

    def read(self, limit_s: float | None) -> Record | None:
        """Returns the next record, or None after the limit. Without a limit it waits
        until one comes.
        """
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while (record := self.take()) is None:
            remaining_s = None if deadline is None else deadline - time.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                return None
            self.wait(remaining_s)
        return record

    def take(self) -> Record | None:
        """Returns the next record, if all of it is written."""
        while True:
            while self._is_written():
                if (record := self._take_part()) is not None:
                    return record
            try:
                os.eventfd_read(self._event)
            except BlockingIOError:
                return None

    def has_record(self) -> bool:
        """Whether something is written that is not taken. May be called on any thread."""
        return self._is_written()

    def wait(self, limit_s: float | None) -> None:
        """Returns after a write, a signal of the event, or the limit."""
        for _ in range(SPINS):
            if self._is_written():
                return
            os.sched_yield()
        self._poll.poll(None if limit_s is None else limit_s * 1000)

    def _is_written(self) -> bool:
        return self._ring.counts[0] > self._num_taken

    def _take_part(self) -> Record | None:
        part = self._decode(time.monotonic() + TORN_S)
        self._num_taken += 1
        self._ring.set_taken(self._reader, self._num_taken)
        return self._assembly.add(part)

    def _decode(self, deadline: float) -> Part:
        while True:
            try:
                return decode_part(self._ring.slot(self._num_taken), self._num_taken)
            except RingError:
                if time.monotonic() > deadline:
                    raise

    def close(self) -> None:
        self._ring.close()
