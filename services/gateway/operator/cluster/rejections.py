"""Requests that gateways rejected, as one row for each gateway and error code. No I/O."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

import msgspec

from shared.fleet.read_fleet import Rejection
from shared.messages import GatewayLoad

MAX_ROWS = 64
SHOWN_S = 3600.0  # time since the last rejection of a row
RECENT_MIN = 15
UNKNOWN = "unknown"  # a gateway of an older release does not report codes


class Rejections:
    """The rows, the last rejection first; a row counts since it was new. `wall` returns Unix
    seconds. `on_added` is called with the code and the number of further rejections.
    """

    def __init__(self, wall: Callable[[], float], on_added: Callable[[str, int], None]) -> None:
        self._wall = wall
        self._on_added = on_added
        self._rows: dict[tuple[str, str], Rejection] = {}
        self._minutes: defaultdict[tuple[str, str], Counter[int]] = defaultdict(Counter)

    @property
    def rows(self) -> tuple[Rejection, ...]:
        oldest = self._wall() - SHOWN_S
        found = [each for each in self._rows.values() if each.at >= oldest]
        found = sorted(found, key=lambda each: -each.at)[:MAX_ROWS]
        self._rows = {(each.gateway_id, each.code): each for each in found}
        for gone in self._minutes.keys() - self._rows.keys():
            del self._minutes[gone]
        return tuple(found)

    @property
    def recent(self) -> tuple[Rejection, ...]:
        """The rows with the rejections of the last RECENT_MIN alone, begun minutes included."""
        first = self._minute() - RECENT_MIN + 1
        found = []
        for row in self.rows:
            minutes = self._minutes[row.gateway_id, row.code]
            count = sum(num for minute, num in minutes.items() if minute >= first)
            if count:
                found.append(msgspec.structs.replace(row, count=count))
        return tuple(found)

    def _minute(self) -> int:
        return int(self._wall() // 60)

    def count(self, gateway_id: str, before: GatewayLoad, load: GatewayLoad) -> None:
        """Adds the difference of a gateway's counters."""
        num_known = 0
        known = dict(before.rejections)
        for code, count in load.rejections:
            num_known += self._add(gateway_id, code, count - known.get(code, 0))
        num_all = load.num_refused_requests - before.num_refused_requests
        self._add(gateway_id, UNKNOWN, num_all - num_known)

    def _add(self, gateway_id: str, code: str, count: int) -> int:
        if count <= 0:
            return 0
        self._on_added(code, count)
        row, minutes = self._rows.get((gateway_id, code)), self._minutes[gateway_id, code]
        minutes[self._minute()] += count
        if len(minutes) > RECENT_MIN:
            del minutes[min(minutes)]
        self._rows[gateway_id, code] = Rejection(
            gateway_id=gateway_id,
            code=code,
            count=count + (0 if row is None else row.count),
            at=round(self._wall(), 3),
        )
        return count
