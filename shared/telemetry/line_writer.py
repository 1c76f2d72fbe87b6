"""Writes lines to a file descriptor without raising and without blocking.

A log is no reason to stop serving. A line is dropped and counted if it cannot be written: on a full
disk, on a pipe whose reader has gone, and on one whose reader does not read. The next line that can
be written follows a report of the dropped ones.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import stat
import sys
import time
from collections.abc import Callable
from threading import RLock

PART_BYTES = 4096  # PIPE_BUF: a pipe that is ready for writing takes so many at once
PATIENCE_S = 0.02  # wait for a reader that is slower than one burst of lines
PAUSE_S = 1.0  # no line waits so long after a dropped one


def no_report(num_dropped: int) -> bytes:
    return b""


class LineWriter:
    def __init__(
        self,
        fd: int,
        *,
        report: Callable[[int], bytes] = no_report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Writes lines. `report` returns the line that follows so many dropped ones."""
        self.num_dropped = 0  # lines since the last report
        self.fd = fd
        self.report = report
        self._clock = clock
        self._impatient_until = 0.0
        self._is_cut = False  # the last line has only its beginning
        self._lock = RLock()  # reentrant: a signal handler or a finalizer may log, too
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, line: bytes) -> None:
        with self._lock:
            if self.num_dropped and self._put(self.report(self.num_dropped)):
                self.num_dropped = 0
            if self.num_dropped or not self._put(line):
                self.num_dropped += 1
                self._impatient_until = self._clock() + PAUSE_S

    def _put(self, line: bytes) -> bool:
        """Returns whether the descriptor took all of it."""
        rest = b"\n" + line if self._is_cut else line
        taken = 0
        try:
            while taken < len(rest) and self._is_ready():
                taken += os.write(self.fd, rest[taken : taken + PART_BYTES])
        except (OSError, RuntimeError):  # RuntimeError: a signal handler logs within this poll
            pass
        self._is_cut = 0 < taken < len(rest) or (self._is_cut and not taken)
        return taken == len(rest)

    def _is_ready(self) -> bool:
        patience_s = 0.0 if self._clock() < self._impatient_until else PATIENCE_S
        ready = self._poll.poll(patience_s * 1000)
        return bool(ready) and not ready[0][1] & (select.POLLERR | select.POLLNVAL)


class LineStream(io.TextIOBase):
    """A text stream over a LineWriter, for `print`, tracebacks, warnings and libraries."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def write(self, text: str) -> int:
        if text:
            self._writer.write(text.encode(errors="backslashreplace"))
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._writer.fd

    def isatty(self) -> bool:
        return os.isatty(self._writer.fd)


def replace_standard_streams() -> None:
    """Replaces standard output and error, so that writing to them can not stop this process. Call
    it before the first log line.
    """
    replace_standard_error()
    _make_pipe_nonblocking(1)
    sys.stdout = LineStream(LineWriter(1))


def replace_standard_error() -> None:
    """Replaces standard error. Closed descriptors become /dev/null, so that no socket gets their
    numbers.
    """
    for fd in (0, 1, 2):
        _open_if_closed(fd)
    _make_pipe_nonblocking(2)
    sys.stderr = LineStream(LineWriter(2))


def _open_if_closed(fd: int) -> None:
    try:
        os.fstat(fd)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        if null != fd:
            os.dup2(null, fd)
            os.close(null)
        os.set_inheritable(fd, True)


def _make_pipe_nonblocking(fd: int) -> None:
    """Makes a pipe nonblocking, also for native code and children. The pipe is opened again: the
    flag belongs to an open file, and this one is that of other processes, too.
    """
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        return
    with contextlib.suppress(OSError):  # no /proc, no permission, or its reader has gone
        again = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)
        os.dup2(again, fd)
        os.close(again)
