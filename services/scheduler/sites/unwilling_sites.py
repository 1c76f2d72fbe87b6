"""Closes sites that refuse requests or leave them unanswered, several in a row. No I/O.

A site says itself how busy and how fast it is, under any number of names of gateways, and its next
state would open a worker that has refused. So the starts that it has not taken close all of it, as
those of a silent worker close that one: for 2.5 s after three in a row, then for up to 10 s after
one more. A request that it takes opens it.
"""

from __future__ import annotations

from services.scheduler.silent_workers import SilentWorkers


class UnwillingSites:
    def __init__(self) -> None:
        self._starts = SilentWorkers()

    def not_taken(self, site: str, sent_at: float, now: float) -> float | None:
        """Records a start that the site refused or left unanswered. Returns for how many seconds
        that closes it.
        """
        return self._starts.record(site, sent_at, now)

    def taken(self, site: str) -> None:
        self._starts.forget(site)

    def closed(self, now: float) -> set[str]:
        return self._starts.closed(now)
