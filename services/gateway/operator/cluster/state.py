"""The cluster as the page shows it: processes and the last events, as snapshots and deltas.
No I/O.

A delta has the changed fields of each process; null removes a field. Events of gateways are
differences between their counters, so that many rejected requests are one event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from shared.fleet.fleet_view import FleetView, ProcessView
from shared.lifecycle.health import Fleet, Loss
from shared.messages import GatewayLoad, Heartbeat

MAX_EVENTS = 50
_COUNTED = {
    "resubmitted": "num_resubmissions",
    "refused": "num_refused_requests",
    "stream lost": "num_lost_streams",
}

Fields = dict[str, Any]


class ClusterEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One change in the cluster. `at` is Unix time in seconds. `kind` is "joined", "returned", a
    value of Loss, or a counter of a gateway.
    """

    number: int
    at: float
    kind: str
    process_id: str
    count: int = 1


class ClusterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    number: int  # the number of the last delta that it contains
    gateway_id: str
    processes: dict[str, Fields]
    events: tuple[ClusterEvent, ...]


class ClusterDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    number: int
    changed: dict[str, Fields] = {}
    removed: tuple[str, ...] = ()
    events: tuple[ClusterEvent, ...] = ()


class ClusterView:
    def __init__(self, fleet: Fleet, now: Callable[[], float], wall: Callable[[], float]) -> None:
        self._view = FleetView(fleet)
        self._own_id = fleet.own_process_id
        self._now = now
        self._wall = wall
        self._loads: dict[str, GatewayLoad] = {}
        self._events: deque[ClusterEvent] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0
        self._num_sent_events = 0
        self._sent: dict[str, Fields] = {}
        self._number = 0

    def observe(self, heartbeat: Heartbeat) -> None:
        process_id = heartbeat.process_id
        was_known = process_id in self._view
        was_lost = was_known and self._view.is_lost(process_id)
        self._view.observe(heartbeat, self._now())
        if heartbeat.state == "stopped":
            if was_known:
                self._add(Loss.STOPPED.value, process_id)
        elif not was_known and process_id in self._view:
            self._add("joined", process_id)
        elif was_lost and not self._view.is_lost(process_id):
            self._add("returned", process_id)
        if heartbeat.gateway is not None:
            self._count(process_id, heartbeat.gateway)

    def lose(self, process_id: str, loss: Loss) -> None:
        self._view.lose(process_id, loss, self._now())
        if loss is not Loss.STOPPED:  # `observe` adds this event
            self._add(loss.value, process_id)

    def snapshot(self) -> ClusterSnapshot:
        """Returns the current state."""
        return self._snapshot(self._processes(), tuple(self._events))

    def last(self) -> ClusterSnapshot:
        """Returns the state of the last delta, so that the next delta follows it."""
        num_unsent = self._num_events - self._num_sent_events
        events = tuple(self._events)
        return self._snapshot(self._sent, events[: max(0, len(events) - num_unsent)])

    def _snapshot(
        self, processes: dict[str, Fields], events: tuple[ClusterEvent, ...]
    ) -> ClusterSnapshot:
        return ClusterSnapshot(
            number=self._number, gateway_id=self._own_id, processes=processes, events=events
        )

    def delta(self) -> ClusterDelta:
        """Returns the changes since the last call."""
        processes, events = self._processes(), self._num_events - self._num_sent_events
        before, self._sent = self._sent, processes
        self._num_sent_events = self._num_events
        self._number += 1
        return ClusterDelta(
            number=self._number,
            changed=_changes(before, processes),
            removed=tuple(before.keys() - processes.keys()),
            events=tuple(self._events)[-events:] if events else (),
        )

    def rows(self) -> list[ProcessView]:
        """Returns all processes, and those that were lost."""
        now = self._now()
        self._view.forget(now)
        return self._view.rows(now)

    def _processes(self) -> dict[str, Fields]:
        return {each.process_id: _fields(each) for each in self.rows()}

    def _count(self, process_id: str, load: GatewayLoad) -> None:
        before = self._loads.get(process_id)
        self._loads[process_id] = load
        if before is None:
            return
        for kind, field in _COUNTED.items():
            count = getattr(load, field) - getattr(before, field)
            if count > 0:
                self._add(kind, process_id, count)

    def _add(self, kind: str, process_id: str, count: int = 1) -> None:
        self._num_events += 1
        self._events.append(
            ClusterEvent(
                number=self._num_events,
                at=round(self._wall(), 3),
                kind=kind,
                process_id=process_id,
                count=count,
            )
        )


def _fields(view: ProcessView) -> Fields:
    fields: Fields = msgspec.to_builtins(view)
    del fields["process_id"]
    return fields


def _changes(before: dict[str, Fields], after: dict[str, Fields]) -> dict[str, Fields]:
    found = {name: _changed(before.get(name, {}), fields) for name, fields in after.items()}
    return {name: fields for name, fields in found.items() if fields}


def _changed(before: Fields, after: Fields) -> Fields:
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    return changed | dict.fromkeys(before.keys() - after.keys())
