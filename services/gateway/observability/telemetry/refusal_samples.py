"""Chooses the rejections that are logged: a tenant over its limits must not fill the disk. No I/O.

The first rejection of a tenant with one outcome is logged, then one in INTERVAL_S with the number
of rejections since the last line. Metrics count all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

INTERVAL_S = 10.0
MAX_KEYS = 1024  # the rejections of further tenants and outcomes count together


class RefusalCounts(NamedTuple):
    """The rejections that one log line reports. `num_refusals` counts those of its tenant and
    outcome since their last line, `num_others` those of tenants and outcomes without counters of
    their own since the last line that reported any.
    """

    num_refusals: int
    num_others: int


@dataclass(slots=True)
class _Refusals:
    due_at: float
    num_unlogged: int = 0

    def take_due(self, now: float) -> int:
        """Returns and resets the number of unlogged rejections, or 0 before the next line
        is due.
        """
        if now < self.due_at:
            return 0
        self.due_at = now + INTERVAL_S
        num_refusals, self.num_unlogged = self.num_unlogged, 0
        return num_refusals


class RefusalSamples:
    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str], _Refusals] = {}
        self._others = _Refusals(due_at=0.0)

    def counts_to_log(self, tenant_id: str, outcome: str, now: float) -> RefusalCounts | None:
        """Counts a rejection. Returns the counts for a log line, or None if no line is due."""
        refusals = self._refusals((tenant_id, outcome), now)
        refusals.num_unlogged += 1
        num_refusals = refusals.take_due(now)
        if not num_refusals:
            return None
        if refusals is self._others:
            return RefusalCounts(1, num_refusals - 1)
        num_others, self._others.num_unlogged = self._others.num_unlogged, 0
        return RefusalCounts(num_refusals, num_others)

    def _refusals(self, key: tuple[str, str], now: float) -> _Refusals:
        found = self._by_key.get(key)
        if found is None and len(self._by_key) >= MAX_KEYS:
            self._forget(now)
        if found is None and len(self._by_key) >= MAX_KEYS:
            return self._others
        return found or self._by_key.setdefault(key, _Refusals(due_at=now))

    def _forget(self, now: float) -> None:
        """Removes the counters whose next rejection would be logged in any case."""
        due = [key for key, each in self._by_key.items() if now >= each.due_at]
        self._others.num_unlogged += sum(self._by_key.pop(key).num_unlogged for key in due)
