"""Decides by expected demand which models are hot, with fewer wakes than plain least recent use.

A waiting model is woken where that is cheapest: from standby before cold, with free memory before
parking others, idle ones before busy ones. Where a model must be parked for it, that is the one
whose expected cost of being parked is least:

    cost(m) = rate(m) · wake(m) · PRIORITY_WEIGHT ^ priority(m)     0 with another hot replica

with rate(m) the decayed rate of arrivals, at most 1 / time since the last one. If parking it costs
more than the waiting model gains, requests gather first: the wake is due when the oldest of them
would otherwise miss the target of time to first token, or the earliest deadline. Until then other
requests of the same model arrive, which one wake serves together. A woken model is hot for a
minimum time, in proportion to its wake, and models with requests are parked only where all have
some. Pinned ones never are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from services.scheduler.residency.parking_victims import chosen_victims
from services.scheduler.residency.view import (
    UNUSED,
    Action,
    Demands,
    Device,
    ModelId,
    Park,
    Resident,
    Wake,
)

PRIORITY_WEIGHT = 4.0
MAX_PRIORITY = 4
MIN_HOT_S = 0.25
MIN_HOT_PER_WAKE = 1.0  # a model is hot for at least so many times its wake
SAFETY = 1.5  # factor of expected wakes, before a deadline
SLACK_S = 0.5
EARLY_S = 0.25  # a wake begins so much before it is due if the models to park are idle
GAIN_RATIO = 4.0
LATE_S = 0.5
TURN_S = 0.5
BUSY_RATE = 2.0  # arrivals per second
REPLICA_AGE_S = 0.5  # least age of the oldest request of a queue that wants another replica
REPLICA_QUEUE = 4  # least number of its requests; both must hold


@dataclass(frozen=True, slots=True)
class _Option:
    """A way to wake `target`: on `device`, after parking `victims`."""

    device: Device
    target: Resident
    victims: tuple[Resident, ...]
    cost: float  # cost of parking the victims
    num_busy: int  # victims that are busy

    @property
    def order(self) -> tuple[bool, int, bool, bool, float, int]:
        is_cold, is_short = self.target.is_cold, bool(self.victims)
        place = self.cost, self.device.num_running
        return self.target.is_avoided, self.num_busy, is_cold, is_short, *place

    def actions(self) -> Iterator[Action]:
        for each in self.victims:
            yield Park(self.device.host_id, *each.model)
        yield Wake(self.device.host_id, *self.target.model)


class DemandPolicy:
    def __init__(self, *, ttft_target_s: float = 2.0) -> None:
        self._ttft_target_s = ttft_target_s

    def decide(self, devices: Sequence[Device], demands: Demands, now: float) -> list[Action]:
        return _Decision(devices, demands, now, self._ttft_target_s).actions()


class _Decision:
    def __init__(
        self, devices: Sequence[Device], demands: Demands, now: float, ttft_target_s: float
    ) -> None:
        self._devices, self._demands, self._now = devices, demands, now
        self._ttft_target_s = ttft_target_s
        self._taken: set[int] = set()  # devices with a wake, by id
        self._residents: dict[ModelId, list[tuple[Device, Resident]]] = {
            model: [
                (each, each.models[model])
                for each in devices
                if model in each.models and demand.may_be_on(each)
            ]
            for model, demand in demands.items()
            if demand.num_queued
        }
        self._due = {each: self._alone_due_at(each) for each in self._residents}
        self._order = sorted(self._residents, key=lambda each: (self._due[each], each))
        self._let_wakes_queue()

    def actions(self) -> list[Action]:
        actions: list[Action] = []
        for model in self._order:
            option = self._wake(model)
            if option is not None:
                self._taken.add(id(option.device))
                actions += option.actions()
        return actions

    def _wake(self, model: ModelId) -> _Option | None:
        residents = [resident for _, resident in self._residents[model]]
        deadline_at = self._demands[model].deadline_at
        under_way = [each.ready_at for each in residents if each.is_under_way]
        if under_way and not self._now < deadline_at < min(under_way):
            return None
        is_replica = any(each.is_hot for each in residents)
        if is_replica and not self._wants_replica(model):
            return None
        option = min(self._options(model), key=lambda each: each.order, default=None)
        if option is None or self._is_worth_waiting(model, option):
            return None
        if under_way and self._now + option.target.ready_in_s > deadline_at:
            return None
        if not option.victims or self._gains(option):
            return option
        is_due = self._now >= self._due[model] - (0.0 if option.num_busy else EARLY_S)
        return option if is_due and not is_replica else None

    def _wants_replica(self, model: ModelId) -> bool:
        demand = self._demands[model]
        is_late = self._now - demand.oldest_at >= REPLICA_AGE_S
        return is_late and demand.num_queued >= REPLICA_QUEUE

    def _options(self, model: ModelId) -> Iterator[_Option]:
        for device, target in self._residents[model]:
            if device.is_waking or id(device) in self._taken or not target.can_be_woken:
                continue
            hot = [each for each in device.models.values() if each.is_hot and not each.is_pinned]
            hot = sorted((each for each in hot if each.model != model), key=self._parking_order)
            if self._now >= self._due[model] + LATE_S:
                hot = [each for each in hot if self._may_be_parked(each, model)]
            victims = chosen_victims(device, target, hot)
            if victims is not None and all(self._may_be_parked(each, model) for each in victims):
                cost = sum(map(self._cost, victims))
                num_busy = sum(map(self._is_busy, victims))
                yield _Option(device, target, tuple(victims), cost, num_busy)

    def _may_be_parked(self, resident: Resident, waiting: ModelId) -> bool:
        """Whether it has been hot for long enough, or the deadline of the other would be missed."""
        min_hot_s = max(MIN_HOT_S, MIN_HOT_PER_WAKE * resident.wake_s)
        return resident.hot_s >= min_hot_s or self._now >= self._last_moment(waiting)

    def _parking_order(self, resident: Resident) -> tuple[bool, float, int]:
        return self._is_busy(resident), self._cost(resident), resident.num_running

    def _is_busy(self, resident: Resident) -> bool:
        """Whether the model serves requests or has some that wait, or is used so often that it is
        hardly ever idle.
        """
        demand = self._demands.get(resident.model, UNUSED)
        is_used = resident.num_running > 0 or demand.num_queued > 0
        return is_used or demand.expected_rate(self._now) >= BUSY_RATE

    def _cost(self, resident: Resident) -> float:
        """Returns the expected seconds of waking per second of being parked, weighted by
        priority.
        """
        if self._num_hot(resident.model) > 1:
            return 0.0
        return self._value(resident)

    def _value(self, resident: Resident) -> float:
        rate = self._demands.get(resident.model, UNUSED).expected_rate(self._now)
        priority = max(-MAX_PRIORITY, min(MAX_PRIORITY, resident.priority))
        return rate * resident.wake_s * PRIORITY_WEIGHT**priority

    def _num_hot(self, model: ModelId) -> int:
        residents = (each.models.get(model) for each in self._devices)
        return sum(each is not None and each.is_hot for each in residents)

    def _gains(self, option: _Option) -> bool:
        """Whether the victims are idle and will be used much later than the model that waits."""
        share = 1 + self._num_hot(option.target.model)
        value = self._value(option.target) / share
        return option.num_busy == 0 and GAIN_RATIO * option.cost < value

    def _is_worth_waiting(self, model: ModelId, option: _Option) -> bool:
        """Whether a device that wakes another model now has this one in standby: a cold start
        elsewhere takes longer.
        """
        if not option.target.is_cold or self._is_due(model):
            return False
        return any(
            each.state == "standby" and (device.is_waking or id(device) in self._taken)
            for device, each in self._residents[model]
        )

    def _is_due(self, model: ModelId) -> bool:
        return self._now >= self._due[model]

    def _let_wakes_queue(self) -> None:
        """Makes wakes due earlier, the more other wakes follow them: devices wake one model
        after the other.
        """
        due_at = inf
        for model in reversed(self._order):
            if not self._is_served(model):
                turn_s = (self._wake_s(model) + TURN_S) / max(1, len(self._residents[model]))
                due_at = self._due[model] = min(self._due[model], due_at - turn_s)

    def _is_served(self, model: ModelId) -> bool:
        return any(each.is_under_way or each.is_hot for _, each in self._residents[model])

    def _alone_due_at(self, model: ModelId) -> float:
        """Returns when the wake must begin to reach the target, or the earliest deadline."""
        patience_s = max(0.0, self._ttft_target_s - SAFETY * self._wake_s(model))
        target_at = self._demands[model].oldest_at + patience_s
        return min(target_at, self._last_moment(model))

    def _last_moment(self, model: ModelId) -> float:
        return self._demands[model].deadline_at - SAFETY * self._wake_s(model) - SLACK_S

    def _wake_s(self, model: ModelId) -> float:
        found = [each.ready_in_s for _, each in self._residents[model] if each.can_be_woken]
        return min(found, default=0.0)
