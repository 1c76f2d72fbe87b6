"""Logs that cannot be written."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

PIPE_BYTES = 4096


def full_disk(log: Path) -> None:
    log.unlink(missing_ok=True)
    log.symlink_to("/dev/full")


def stopped_reader(log: Path) -> int:
    """Returns the reading end of a full pipe."""
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(log, os.O_WRONLY | os.O_NONBLOCK)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"\n" * PIPE_BYTES)
    os.close(writer)
    return reader
