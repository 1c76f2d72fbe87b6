"""Sends records to processes that may be busy, without waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from shared.background import item_error
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

    `on_lost` gets what a writer raises, at once and on the thread that writes: the record may lack
    at readers, so none follows it.
    """

    def __init__(
        self, writers: Sequence[RecordWriter], on_lost: Callable[[Exception], None]
    ) -> None:
        self._writers = writers
        self._on_lost = on_lost
        self._has_ended = False
        self._thread = ThreadPoolExecutor(1, "record-sender")  # started by the first late record
        self._last_late: Future[None] | None = None

    def send(self, record: Record) -> None:
        """Does nothing after a record that was lost."""
        if self._has_ended:
            return
        is_first = self._last_late is None or self._last_late.done()
        if is_first and all(each.has_room(record) for each in self._writers):
            self._write(record)
        else:
            self._last_late = self._thread.submit(self._write, record)

    def _write(self, record: Record) -> None:
        try:
            for each in self._writers:
                if not self._has_ended:
                    each.write(record)
        except BaseException as raised:  # every error is handled here: no caller awaits the thread
            error = item_error(raised)
            if not self._has_ended:
                self._has_ended = True
                self._on_lost(error)

    def close(self) -> None:
        """Stops sending: late records may be lost. The writers are not closed."""
        self._has_ended = True
        for each in self._writers:
            each.stop()
        self._thread.shutdown()
