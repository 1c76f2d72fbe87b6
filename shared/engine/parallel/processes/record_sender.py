"""Sends records to processes that may be busy, without waiting for them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from shared.engine.parallel.processes.records import Record


class RecordWriter(Protocol):
    def has_room(self, record: Record) -> bool:
        """Whether `write` would not wait for a reader."""
        ...

    def write(self, record: Record) -> None: ...

    def stop(self) -> None:
        """A `write` under way on another thread raises."""
        ...


class RecordSender:
    """Writes each record to all `writers`, in order of `send`. Where one of them has no room now, a
    thread waits for its readers: the caller never does, which may have to serve them meanwhile.
    """

    def __init__(self, writers: Sequence[RecordWriter]) -> None:
        self._writers = writers
        self._thread = ThreadPoolExecutor(1, "record-sender")  # started by the first late record
        self._last_late: Future[None] | None = None

    def send(self, record: Record) -> None:
        """Raises what a writer raises, for this record or a late one before it."""
        if (last := self._last_late) is not None and last.done():
            last.result()
            self._last_late = None
        if self._last_late is None and all(each.has_room(record) for each in self._writers):
            self._write(record)
        else:
            self._last_late = self._thread.submit(self._write_after, self._last_late, record)

    def _write_after(self, before: Future[None] | None, record: Record) -> None:
        if before is not None:
            before.result()
        self._write(record)

    def _write(self, record: Record) -> None:
        for each in self._writers:
            each.write(record)

    def close(self) -> None:
        """Stops sending: late records may be lost. The writers are not closed."""
        for each in self._writers:
            each.stop()
        self._thread.shutdown()
