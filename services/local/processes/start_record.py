"""What a cluster that is starting waits for: a file in its state directory, for other commands."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

import msgspec

from shared.transport.wire_errors import UNREADABLE

FILE_NAME = "starting.json"


class Start(msgspec.Struct, frozen=True):
    """The URL that the gateway will have, and the processes that are not ready yet."""

    url: str = ""
    waits_for: tuple[str, ...] = ()


class StartRecord:
    """Writes the file while it is open. While `workers` are missing, it names these alone: the
    others do not say when they are ready.
    """

    def __init__(self, directory: Path, url: str, workers: Collection[str]) -> None:
        self._path = directory / FILE_NAME
        self._url = url
        self._workers = {*workers}
        self._waits_for: set[str] = set()
        self._is_open = True

    def record(self, process_id: str, *, is_ready: bool) -> None:
        if not self._is_open:
            return
        change = self._waits_for.discard if is_ready else self._waits_for.add
        change(process_id)
        shown = self._waits_for & self._workers or self._waits_for
        start = Start(self._url, tuple(sorted(shown)))
        temporary = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):  # a full disk must not end a start
            temporary.write_bytes(msgspec.json.encode(start))
            temporary.replace(self._path)

    def close(self) -> None:
        self._is_open = False
        self._path.unlink(missing_ok=True)


def read_start(directory: Path) -> Start:
    """Returns an empty Start before anything is known."""
    try:
        return msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=Start)
    except (OSError, *UNREADABLE):
        return Start()
