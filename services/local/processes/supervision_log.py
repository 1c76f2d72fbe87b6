"""The log of `hearth up`: which of its processes have ended and were started again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from services.local.processes.log_files import open_log
from shared.telemetry.log import json_line
from shared.transport.wire_errors import UNREADABLE

PROCESS = "up"
RESTARTING = "process_restarting"
RECENT_S = 3600.0


class Restarts(msgspec.Struct, frozen=True):
    """How often a process was started again, and the Unix time of the last start in seconds."""

    process_id: str
    number: int
    last_at: float


class SupervisionLog:
    """Appends JSON lines like those of services. A full disk costs lines, and so does a lack of
    descriptors.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{PROCESS}.log"

    def write(self, event: str, *, level: str = "warning", **fields: str) -> None:
        timestamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        line = {"timestamp": timestamp, "level": level, "event": event, "process": PROCESS} | fields
        with contextlib.suppress(OSError):
            log = open_log(self.path)
            try:
                os.write(log, f"{json_line(line, str)}\n".encode())
            finally:
                os.close(log)


class _SupervisionLine(msgspec.Struct):
    timestamp: datetime
    event: str
    child: str = ""


def recent_restarts(folder: Path, wall_s: float) -> Sequence[Restarts]:
    """Returns the processes that were started again within RECENT_S before `wall_s`, by name."""
    found: dict[str, list[float]] = {}
    for line in _lines(folder / f"{PROCESS}.log"):
        if line.event == RESTARTING and wall_s - line.timestamp.timestamp() <= RECENT_S:
            found.setdefault(line.child, []).append(line.timestamp.timestamp())
    return [Restarts(name, len(times), max(times)) for name, times in sorted(found.items())]


def _lines(path: Path) -> Iterator[_SupervisionLine]:
    try:
        content = path.read_bytes()
    except OSError:
        return
    for each in content.splitlines():
        with contextlib.suppress(*UNREADABLE):
            yield msgspec.json.decode(each, type=_SupervisionLine)
