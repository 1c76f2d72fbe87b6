"""Wakes and parks that hosts were asked for, until their heartbeats show the result. No I/O.

    asked ──accepted──▶ under way ──hot──▶ forgotten
      │                    └── not hot in time: avoided, and asked again if no other host can
      ├── refused, with a time: not asked again before it
      └── no reply: avoided for a while

A wake's time is up after PATIENCE times its expected duration and SLACK_S. What another scheduler
has asked for is recognised by the model's state, and has the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import structlog

from services.scheduler.residency.view import ModelId

log = structlog.get_logger(__name__)

PATIENCE = 3.0
SLACK_S = 2.0
AVOIDED_S = 10.0  # pause after a wake that did not end in time
SILENT_S = 2.0  # pause after a request without a reply
BUSY_S = 0.5  # pause after a host could not park a model because it served
REFUSED_S = 5.0  # pause after a refusal without a time of the host's own

Key = tuple[str, ModelId]  # host, model


@dataclass(slots=True)
class WakeOrder:
    """A requested wake: `ready_at` is its expected end, `limit_at` the end of its time."""

    ready_at: float
    limit_at: float

    @classmethod
    def of(cls, expected_s: float, now: float) -> WakeOrder:
        return cls(now + expected_s, now + PATIENCE * expected_s + SLACK_S)


@dataclass(frozen=True, slots=True)
class RefusedWake:
    message: str
    until: float
    has_time: bool


class Orders:
    def __init__(self) -> None:
        self._wakes: dict[Key, WakeOrder] = {}
        self._avoided: dict[Key, float] = {}  # end of the pause
        self._refused: dict[Key, RefusedWake] = {}
        self._parking: dict[Key, float] = {}  # end of the time in which they count as under way

    def wake_planned(self, key: Key, expected_s: float, park_s: float, now: float) -> None:
        """Records a wake that is requested once other models are parked, which takes at most
        `park_s`.
        """
        order = WakeOrder.of(expected_s, now)
        self._wakes[key] = WakeOrder(order.ready_at, order.limit_at + park_s)

    def wake_asked(self, key: Key, expected_s: float, now: float) -> None:
        self._wakes[key] = WakeOrder.of(expected_s, now)

    def wake_seen(self, key: Key, expected_s: float, now: float) -> None:
        """Records that a host reports a model on its way to hot."""
        if key not in self._wakes and not self.is_avoided(key, now):
            self._wakes[key] = WakeOrder.of(expected_s, now)

    def accepted(self, key: Key, ready_in_s: float, now: float) -> None:
        self._wakes[key] = WakeOrder.of(ready_in_s, now)
        self._refused.pop(key, None)

    def refused(self, key: Key, message: str, retry_after_s: float | None, now: float) -> None:
        self._wakes.pop(key, None)
        wait_s = REFUSED_S if retry_after_s is None else retry_after_s
        self._refused[key] = RefusedWake(message, now + wait_s, retry_after_s is not None)

    def no_reply(self, key: Key, now: float) -> None:
        self._wakes.pop(key, None)
        self._avoided[key] = now + SILENT_S

    def wake_dropped(self, key: Key) -> None:
        """Forgets a planned wake that was not requested."""
        self._wakes.pop(key, None)

    def hot(self, key: Key) -> None:
        for orders in (self._wakes, self._avoided, self._refused):
            orders.pop(key, None)

    def park_asked(self, key: Key, limit_s: float, now: float) -> None:
        self._parking[key] = now + limit_s

    def park_ended(self, key: Key, now: float, *, is_parked: bool) -> None:
        if is_parked:
            self._parking.pop(key, None)
        else:
            self._parking[key] = now + BUSY_S

    def lost(self, host_id: str) -> None:
        """Forgets all orders to a host."""
        for orders in (self._wakes, self._avoided, self._refused, self._parking):
            for key in [each for each in orders if each[0] == host_id]:
                del orders[key]  # type: ignore[attr-defined]

    def expire(self, now: float) -> None:
        for key, order in list(self._wakes.items()):
            if now > order.limit_at:
                log.warning("wake_overdue", host=key[0], model=key[1][0])
                del self._wakes[key]
                self._avoided[key] = now + AVOIDED_S
        self._avoided = {key: until for key, until in self._avoided.items() if now < until}
        self._refused = {key: each for key, each in self._refused.items() if now < each.until}
        self._parking = {key: until for key, until in self._parking.items() if now < until}

    def wake_of(self, key: Key) -> WakeOrder | None:
        return self._wakes.get(key)

    def is_parking(self, key: Key) -> bool:
        return key in self._parking

    def is_avoided(self, key: Key, now: float) -> bool:
        return now < self._avoided.get(key, -inf)

    def is_refused(self, key: Key) -> bool:
        return key in self._refused

    def ready_at(self, model: ModelId) -> float:
        """Returns the first expected end of the model's wakes, or inf if none is under way."""
        found = (order.ready_at for key, order in self._wakes.items() if key[1] == model)
        return min(found, default=inf)

    def refusal(self, model: ModelId, hosts: frozenset[str]) -> RefusedWake | None:
        """Returns the earliest refusal to end, if all of `hosts` refuse the model."""
        found = [self._refused.get((host_id, model)) for host_id in hosts]
        refusals = [each for each in found if each is not None]
        if not refusals or len(refusals) < len(hosts):
            return None
        return min(refusals, key=lambda each: each.until)
