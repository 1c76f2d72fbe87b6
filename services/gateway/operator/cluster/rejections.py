"""Requests that gateways rejected, as one row for each gateway and error code. No I/O."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shared.messages import GatewayLoad

MAX_ROWS = 64
SHOWN_S = 3600.0  # time since the last rejection of a row
UNKNOWN = "unknown"  # a gateway of an older release does not report codes


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """The rejected requests of one gateway with one error code, since this row was new. `at` is the
    Unix time of the last one, in seconds.
    """

    gateway_id: str
    code: str
    count: int
    at: float


class Rejections:
    """The rows, the last rejection first. `wall` returns Unix seconds."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._rows: dict[tuple[str, str], Rejection] = {}

    @property
    def rows(self) -> tuple[Rejection, ...]:
        oldest = self._wall() - SHOWN_S
        found = [each for each in self._rows.values() if each.at >= oldest]
        found = sorted(found, key=lambda each: -each.at)[:MAX_ROWS]
        self._rows = {(each.gateway_id, each.code): each for each in found}
        return tuple(found)

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
        row = self._rows.get((gateway_id, code))
        self._rows[gateway_id, code] = Rejection(
            gateway_id=gateway_id,
            code=code,
            count=count + (0 if row is None else row.count),
            at=round(self._wall(), 3),
        )
        return count
