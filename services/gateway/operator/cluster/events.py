"""The last events of a cluster, in two rings: losses cannot be pushed out by other events.

Requests that a gateway rejects are no events (`rejections.py`): a client may send any number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import msgspec
from msgspec.structs import replace

from shared.lifecycle.health import Loss

MAX_EVENTS = 50  # of each ring
LOSSES = frozenset(
    {each.value for each in Loss if each is not Loss.STOPPED}
    | {"returned", "moved", "stream lost", "model failed", "killed", "frozen", "link cut"}
)


class ClusterEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change in the cluster. `at` is Unix time in seconds. `kind` is "joined", "returned", a
    value of Loss, "moved" or "stream lost". The process of moved streams is the worker that had
    them, if `gateway_id` knows it.
    """

    number: int
    at: float
    kind: str
    process_id: str
    count: int = 1
    gateway_id: str = ""
    detail: str = ""

    @property
    def is_loss(self) -> bool:
        return self.kind in LOSSES


class EventLog:
    """The last MAX_EVENTS losses and as many other events. `wall` returns Unix seconds."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._losses: deque[ClusterEvent] = deque(maxlen=MAX_EVENTS)
        self._others: deque[ClusterEvent] = deque(maxlen=MAX_EVENTS)
        self.last_number = 0

    def add(
        self, kind: str, process_id: str, count: int = 1, *, gateway_id: str = "", detail: str = ""
    ) -> None:
        self.last_number += 1
        event = ClusterEvent(
            number=self.last_number,
            at=round(self._wall(), 3),
            kind=kind,
            process_id=process_id,
            count=count,
            gateway_id=gateway_id,
            detail=detail,
        )
        (self._losses if event.is_loss else self._others).append(event)

    def restore(self, events: Iterable[ClusterEvent]) -> None:
        """Puts the events of an earlier process before this one's, of which there are none yet."""
        for event in events:
            self.last_number += 1
            event = replace(event, number=self.last_number)
            (self._losses if event.is_loss else self._others).append(event)

    def between(self, after: int, last: int) -> tuple[ClusterEvent, ...]:
        """Returns the events with numbers in (after, last], in order."""
        found = (each for each in (*self._losses, *self._others) if after < each.number <= last)
        return tuple(sorted(found, key=lambda each: each.number))

    @property
    def all(self) -> tuple[ClusterEvent, ...]:
        return self.between(0, self.last_number)
