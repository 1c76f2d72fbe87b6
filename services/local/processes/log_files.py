"""Log files of child processes: each child appends to one, and its parent keeps them bounded.

A disk that is full costs lines, not processes: a log that cannot be opened is /dev/null.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from shared.background import failing_alone
from shared.clock import Clock
from shared.transport.wire_errors import UNREADABLE

# Limit of a log; its last MAX_LOG_BYTES or more before that are in `.log.1`
MAX_LOG_BYTES = 8 << 20
MAX_LINE_BYTES = 16_384  # the end of a log that `last_line` reads
MAX_LOGS = 64  # logs of a folder; the oldest leave first
CHECK_S = 5.0
ERRORS = ("error", "critical")
# Text of a service, of nats-server and of redis-server, which marks its warnings with #, and until
# its release 7.2 lines of its start and end, too.
_LEVEL = re.compile(
    r"\S+ \S+Z (debug|info|warning|error|critical) "
    r"|\[\d+\] \S+ \S+ \[(\w+)\] "
    r"|\d+:[XCSM] \d+ \w+ \d+ \S+ ([.\-*#]) "
)
_REDIS_NOTICE = re.compile(
    r"oO0OoO0OoO0Oo \w+ is starting|\w+ version=|Configuration loaded|Server initialized"
    r"|User requested shutdown|\w+ is now ready to exit"
)
_LEVELS = {
    **dict.fromkeys(("error", "ERR", "#"), "error"),
    **dict.fromkeys(("critical", "FTL"), "critical"),
}


def open_log(path: Path) -> int:
    """Returns a descriptor that appends, also after `bound_logs` has emptied the file."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def level_of(line: str) -> str | None:
    """Returns the level of a line that a service, nats-server or redis-server has logged; None for
    other text.
    """
    if line.startswith("{"):
        try:
            level = msgspec.json.decode(line, type=_LogLine).level
        except UNREADABLE:
            return None
        return level or None
    found = _LEVEL.match(line)
    if found is None:
        return None
    mark = found[found.lastindex or 0]
    if mark == "#" and is_redis_notice(line[found.end() :]):
        return "info"
    return _LEVELS.get(mark, "info")


def is_redis_notice(text: str) -> bool:
    """Whether Redis says that it starts or ends as it should, which it may mark as a warning."""
    return _REDIS_NOTICE.match(text) is not None


def last_event(path: Path) -> str:
    """Returns the name of the event in the last line of a service's log; "" for a warning and for
    other text.
    """
    try:
        line = msgspec.json.decode(last_line(path), type=_LogLine)
    except UNREADABLE:
        return ""
    return line.event if line.level == "info" else ""


class _LogLine(msgspec.Struct):
    level: str = ""
    event: str = ""


def last_line(path: Path) -> str:
    """Returns "" if the log is empty or cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MAX_LINE_BYTES))
            lines = file.read(MAX_LINE_BYTES).decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


async def bound_logs_while_running(
    folder: Path, clock: Clock, in_use: Callable[[], Collection[Path]] = lambda: ()
) -> None:
    """Bounds the logs until it is cancelled. It does not remove logs that are `in_use` by running
    processes.
    """
    while True:
        with failing_alone("logs_not_bounded"):  # no memory for a thread
            await asyncio.to_thread(bound_logs, folder, in_use())
        await clock.sleep(CHECK_S)


def bound_logs(folder: Path, in_use: Collection[Path] = ()) -> None:
    ages = {}
    for path in folder.glob("*.log"):
        with contextlib.suppress(OSError):
            ages[path] = path.stat().st_mtime
            _rotate(path)
    removable = sorted(ages.keys() - {*in_use}, key=ages.__getitem__)
    for path in removable[: max(0, len(ages) - MAX_LOGS)]:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            _previous(path).unlink(missing_ok=True)


def _rotate(path: Path) -> None:
    """Rotates a log. The file stays, as its process has it open."""
    if path.stat().st_size <= MAX_LOG_BYTES:
        return
    with contextlib.suppress(OSError):  # a full disk has room again afterwards
        _copy(path, _previous(path))
    os.truncate(path, 0)


def _copy(path: Path, target: Path) -> None:
    """Copies a log; the copy is as private as the log."""
    target.unlink(missing_ok=True)
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with path.open("rb") as source, os.fdopen(descriptor, "wb") as copy:
        shutil.copyfileobj(source, copy)


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
