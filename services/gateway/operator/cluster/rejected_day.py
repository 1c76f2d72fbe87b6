"""The rejected requests of a day, by error code and hour, as an operator reads them in the morning.
No I/O.

They are those of all gateways. A restarted gateway goes on with what another one, or it itself,
has stored (`kept_history.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from msgspec.structs import replace

from shared.fleet.read_fleet import DAY_S, RejectedCode

HOUR_S = 3600.0
MAX_CODES = 64  # of one hour


class RejectedHour(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one hour. Times are Unix seconds, of the first and the last request."""

    code: str
    count: int
    first_at: float
    last_at: float

    @property
    def key(self) -> tuple[int, str]:
        return int(self.first_at // HOUR_S), self.code


class RejectedDay:
    """`wall` returns Unix seconds."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._hours: dict[tuple[int, str], RejectedHour] = {}  # the oldest first

    def add(self, code: str, count: int) -> None:
        at = round(self._wall(), 3)
        new = RejectedHour(code=code, count=count, first_at=at, last_at=at)
        known = self._hours.get(new.key)
        if known is not None:
            self._hours[new.key] = replace(known, count=known.count + count, last_at=at)
        elif sum(hour == new.key[0] for hour, _ in self._hours) < MAX_CODES:
            self._hours[new.key] = new

    def restore(self, hours: Iterable[RejectedHour]) -> None:
        """Takes the hours of an earlier process, before the first request of this one."""
        self._hours = {each.key: each for each in hours}

    @property
    def hours(self) -> tuple[RejectedHour, ...]:
        """The hours that end within the last day."""
        oldest = (self._wall() - DAY_S) // HOUR_S
        self._hours = {key: each for key, each in self._hours.items() if key[0] > oldest}
        return tuple(self._hours.values())

    @property
    def totals(self) -> tuple[RejectedCode, ...]:
        """The sums by code, most first."""
        found: dict[str, RejectedCode] = {}
        for each in self.hours:
            known = found.get(each.code)
            found[each.code] = RejectedCode(
                code=each.code,
                count=each.count + (0 if known is None else known.count),
                first_at=each.first_at if known is None else known.first_at,
                last_at=each.last_at,
            )
        return tuple(sorted(found.values(), key=lambda each: -each.count))
