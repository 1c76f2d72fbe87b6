"""Decides from failed steps whether the device is to blame. No I/O.

A request that breaks steps must not take the device from others: failures in a row count once for
each request, however often it is tried here, and on a worker that several tenants use they must
come from more than one.
"""

from __future__ import annotations

from shared.engine.batching.batcher import ScheduledSequence

MAX_IN_A_ROW = 3


class FailedSteps:
    def __init__(self) -> None:
        self.num_failed = 0  # steps since the start
        self._in_a_row: dict[str | bytes, str] = {}  # origin -> tenant, since a success
        self._served: set[str] = set()  # two tenants at most: more tell nothing more

    @property
    def is_device_lost(self) -> bool:
        tenants = set(self._in_a_row.values())
        is_shared = len(tenants | self._served) > 1
        return len(self._in_a_row) >= MAX_IN_A_ROW and (len(tenants) > 1 or not is_shared)

    def succeeded(self, row: ScheduledSequence) -> None:
        """Records a row that was computed."""
        self._in_a_row.clear()
        if len(self._served) < 2:
            self._served.add(row.sequence.tenant_id)

    def failed(self, row: ScheduledSequence) -> None:
        """Records a step in which no row could be computed. `row` is any of its rows."""
        self._in_a_row[row.sequence.origin] = row.sequence.tenant_id
