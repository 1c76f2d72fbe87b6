"""Lines of the log that others can cause: one of each kind a minute."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Any

INTERVAL_S = 60.0
MAX_KINDS = 1024  # the last ones are remembered


class LogLimit:
    """Writes the first line of each kind, then one in INTERVAL_S with the number of those left out.
    `now` returns seconds.
    """

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._written: dict[tuple[str, str], tuple[float, int]] = {}  # time, lines left out since

    def write(self, write: Callable[..., object], event: str, of: str, **fields: Any) -> None:
        """Calls `write(event, **fields)`, unless a line of this event has just been written. Of
        different `of`, as of sites, each has its own line.
        """
        now, kind = self._now(), (event, of)
        written_at, num_left_out = self._written.pop(kind, (-inf, 0))
        if now - written_at < INTERVAL_S:
            self._written[kind] = written_at, num_left_out + 1
            return
        self._written[kind] = now, 0
        if len(self._written) > MAX_KINDS:
            del self._written[next(iter(self._written))]
        more = {"num_left_out": num_left_out} if num_left_out else {}
        write(event, **fields, **more)
