"""The failed operations of workers that have stopped.

A worker whose device fails stops at once, and its own counter disappears, mostly before a scrape
has read it.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.messages import Heartbeat
from shared.metrics.families.failed_operations import FailedOperations, failed_operations

MAX_WORKERS = 256  # the workers that stopped first are removed


class StoppedWorkers:
    """The failed operations of each worker id, summed over all its processes that stopped after a
    failure.
    """

    def __init__(self) -> None:
        self._failed: dict[str, FailedOperations] = {}

    @property
    def failed(self) -> Mapping[str, FailedOperations]:
        """A copy of the counts by worker id, for any thread."""
        return self._failed.copy()

    def observe(self, heartbeat: Heartbeat) -> None:
        if heartbeat.state != "stopped" or heartbeat.load is None:
            return
        now = failed_operations(heartbeat.load)
        if not any(now):
            return
        before = self._failed.pop(heartbeat.process_id, FailedOperations())
        self._failed[heartbeat.process_id] = before.plus(now)
        if len(self._failed) > MAX_WORKERS:
            del self._failed[next(iter(self._failed))]
