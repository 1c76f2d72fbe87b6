"""Reads the log files of processes, and what is added to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from services.cli.logs.log_lines import LogLine, parse_line


class LogTail:
    """The log of one process. `read` returns what has been added since the last call, first of all
    the whole log with the part that was rotated away.
    """

    def __init__(self, path: Path) -> None:
        self.process = path.stem
        self._path = path
        self._position = 0
        self._before_s = 0.0
        self._is_new = True

    def read(self) -> list[LogLine]:
        older = b""
        if self._is_new:
            self._is_new = False
            older = _content(self._path.with_name(f"{self._path.name}.1"), 0) or b""
        added = _content(self._path, self._position)
        if added is None:
            added, self._position = _content(self._path, 0) or b"", 0
        whole, _, _ = added.rpartition(b"\n")  # the rest of an unfinished line is read later
        self._position += len(whole) + 1 if whole else 0
        text = (older + whole).decode(errors="replace")
        raw = [each for each in text.split("\n") if each.strip()]
        if raw and not self._before_s:
            self._before_s = self._first_time(raw)
        return [self._parsed(each) for each in raw]

    def _first_time(self, raw: Iterable[str]) -> float:
        """Returns the first time of these lines, which those before it have too; without any, that
        of the last write.
        """
        times = (parse_line(each, self.process, 0.0).unix_s for each in raw)
        return next((each for each in times if each), _written_s(self._path))

    def _parsed(self, raw: str) -> LogLine:
        line = parse_line(raw, self.process, self._before_s)
        self._before_s = line.unix_s
        return line


def _content(path: Path, position: int) -> bytes | None:
    """Returns the bytes from a position on, or None if the file has been emptied: it is shorter."""
    try:
        with path.open("rb") as file:
            if position > path.stat().st_size:
                return None
            file.seek(position)
            return file.read()
    except OSError:
        return b""


def _written_s(path: Path) -> float:
    """Returns when the file was last written, as Unix time; 0 if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def find_logs(folders: Iterable[Path]) -> dict[str, Path]:
    """Returns the log files by process."""
    found = (path for folder in folders for path in folder.glob("*.log"))
    return {path.stem: path for path in sorted(found)}


def last_lines(lines: Iterable[LogLine], count: int) -> Sequence[LogLine]:
    """Returns the last lines in the order of their times; all of them if `count` is 0."""
    ordered = sorted(lines, key=lambda each: each.unix_s)
    return ordered[-count:] if count else ordered


def follow(
    find: Callable[[], dict[str, Path]],
    tails: dict[str, LogTail],
    wait: Callable[[], bool],
) -> Iterator[LogLine]:
    """Yields what is added to the logs, also to new ones, until `wait` returns False. Lines that
    are read together come in the order of their times.
    """
    goes_on = True
    while goes_on:
        goes_on = wait()
        for process, path in find().items():
            tails.setdefault(process, LogTail(path))
        added = [line for tail in tails.values() for line in tail.read()]
        yield from last_lines(added, 0)
