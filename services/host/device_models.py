"""The models of one device: which becomes hot next, what makes room for it, and how large the
caches are. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf

import msgspec

from services.host.budget import (
    ModelKey,
    ModelMemory,
    Room,
    kv_sizes,
    retention,
    room_for,
    standby_starts,
)
from services.host.hosted_model import (
    HAS_KV,
    Action,
    HostedState,
    ParkAction,
    ResizeAction,
    StartAction,
    StopAction,
    WakeAction,
)

RESIZE_SHARE = 0.125  # share of a cache's size: smaller changes are not worth a message
LEAST_RESIZE_S = 1.0  # time between changes that follow the need
LOST_PAUSE_S, MAX_LOST_PAUSE_S = 5.0, 40.0  # pauses before a lost device is tried again


@dataclass(slots=True)
class DeviceModels:
    name: str
    budget_bytes: int
    # bytes of the host's memory that are left for weights of parked models
    offload_room: Callable[[], int] = lambda: 0
    models: dict[ModelKey, HostedState] = field(default_factory=dict)
    lost_until: float = 0.0
    num_losses: int = 0  # losses in a row
    resized_at: float = -1e9

    @property
    def is_elastic(self) -> bool:
        """Whether caches change their sizes while they serve; elsewhere a wake gives the size."""
        return self.name == "cpu"

    # ── memory ───────────────────────────────────────────────────────────────────────────────────

    @property
    def used_bytes(self) -> int:
        return sum(each.used_bytes for each in self.models.values())

    @property
    def unclaimed_bytes(self) -> int:
        """Bytes that would be left if all its models had a process."""
        return self.budget_bytes - sum(each.memory.fixed_bytes for each in self.models.values())

    def hot(self) -> set[ModelKey]:
        """Returns the models with a cache, or wanted with one. A model that parks gives its cache
        back.
        """
        return {each.key for each in self.models.values() if each.is_hot_soon}

    def room(self, model: HostedState) -> Room:
        """Returns the room for `model`, which may be of another device, and have no process."""
        others = [each for each in self.models.values() if each.has_process or each.is_wake_wanted]
        staying = [self.committed(each) for each in others if each.state != "stopping"]
        hot = self.hot()
        idle = {each.key for each in others if each.state == "standby"} - hot
        return room_for(model.memory, self.budget_bytes, staying, hot=hot, stoppable=idle)

    def committed(self, model: HostedState) -> ModelMemory:
        """Returns the model's memory. A cache that is not elastic has its present
        size as its floor.
        """
        if self.is_elastic or model.kv_bytes <= model.memory.kv_floor_bytes:
            return model.memory
        return msgspec.structs.replace(model.memory, kv_floor_bytes=model.kv_bytes)

    def _planned(self, model: HostedState) -> ModelMemory:
        """Returns the memory of a model that gets a process: whether its weights leave the device
        in standby.
        """
        memory = model.memory
        if self.name == "cpu" or memory.weights_bytes > self.offload_room():
            return memory
        return msgspec.structs.replace(memory, offloaded_bytes=memory.weights_bytes)

    def _wake_bytes(self, model: HostedState, spare_bytes: int) -> int:
        """Returns the bytes of its cache. One that cannot grow gets half of what is left beyond its
        floor.
        """
        memory = model.memory
        grown = memory.kv_floor_bytes + (0 if self.is_elastic else spare_bytes // 2)
        return int(max(memory.kv_floor_bytes, min(grown, memory.kv_ceiling_bytes)))

    def lose(self, now: float) -> None:
        self.num_losses += 1
        self.lost_until = now + min(MAX_LOST_PAUSE_S, LOST_PAUSE_S * self.num_losses)

    def correct(self, now: float) -> Iterator[Action]:
        """Frees memory if measured sizes exceed the budget: ends processes in standby, and if they
        are not enough parks hot models.
        """
        staying = [each for each in self.models.values() if each.has_process]
        staying = [each for each in staying if each.state not in ("stopping", "parking")]
        least = sum(each.least_bytes for each in staying)
        for model in sorted(
            staying, key=lambda each: (each.state == "hot", retention(each.memory))
        ):
            if least <= self.budget_bytes:
                return
            if model.state == "hot":
                least -= model.memory.wake_bytes
                model.enter("parking", now)
                yield ParkAction(model.key)
            elif model.state == "standby":
                least -= model.memory.standby_bytes
                model.enter("stopping", now)
                yield StopAction(model.key)

    # ── wakes ────────────────────────────────────────────────────────────────────────────────────

    def becoming_hot(self) -> list[HostedState]:
        return [each for each in self.models.values() if each.is_becoming_hot]

    def wanted(self) -> list[HostedState]:
        """Returns the wakes that wait, the next one first."""
        waiting = [
            each
            for each in self.models.values()
            if each.is_wake_wanted and not each.is_becoming_hot
        ]
        return sorted(waiting, key=lambda each: (-each.memory.priority, each.wanted_at))

    def advance_wakes(self, now: float) -> Iterator[Action]:
        if self.becoming_hot() or now < self.lost_until:
            return
        for model in self.wanted():
            if model.state in ("standby", "cold", "failed") and now >= model.retry_at:
                yield from self._wake(model, now)
                return

    def _wake(self, model: HostedState, now: float) -> Iterator[Action]:
        """Wakes the model, or first makes room for it."""
        room, memory = self.room(model), model.memory
        if room.missing_bytes:  # a model did not park after all
            model.is_wake_wanted = False
            return
        for key in room.stops:
            self.models[key].enter("stopping", now)
            yield StopAction(key)
        needed = memory.least_hot_bytes - model.used_bytes
        spare = self.budget_bytes - self.used_bytes - needed
        if spare < 0:
            yield from self._shrink(model)
            return
        kv_bytes = self._wake_bytes(model, spare)
        if model.state == "standby":
            model.kv_bytes = model.resized_to = kv_bytes
            model.enter("waking", now)
            yield WakeAction(model.key, model.kv_bytes)
            return
        model.memory = self._planned(model)
        model.enter("starting", now)
        if model.is_known:  # a first start ends in standby, where the worker is checked
            model.kv_bytes = model.resized_to = kv_bytes
        yield StartAction(model.key, self.name, model.kv_bytes or None)

    def _shrink(self, target: HostedState) -> Iterator[Action]:
        """Shrinks hot caches to the memory that remains beside the target."""
        sizes = self._sizes(target) if self.is_elastic else {}
        for model in self.models.values():
            if model.state == "hot" and sizes.get(model.key, inf) < model.resized_to:
                model.resized_to = sizes[model.key]
                yield ResizeAction(model.key, model.resized_to)

    # ── sizes of caches ──────────────────────────────────────────────────────────────────────────

    def resize(self, now: float) -> Iterator[Action]:
        """Resizes caches by need while no model waits to become hot, first those that shrink.

        A cache shrinks by any amount if that makes room, or if measured sizes exceed the budget.
        """
        is_busy = bool(self.becoming_hot() or self.wanted())
        if not self.is_elastic or is_busy or now - self.resized_at < LEAST_RESIZE_S:
            return
        starting = self.next_standby(now)
        sizes = self._sizes(starting)
        free = self.budget_bytes - self.used_bytes
        is_short = free < (0 if starting is None else starting.memory.fixed_bytes)
        hot = [each for each in self.models.values() if each.state == "hot"]
        for model in hot:
            size = sizes[model.key]
            if size < model.resized_to and (is_short or _is_worth_moving(model, size)):
                yield self._resized(model, size, now)
        if starting is not None:
            return
        for model in hot:
            size = min(sizes[model.key], model.kv_bytes + max(0, free))
            if size > model.resized_to and _is_worth_moving(model, size):
                free -= size - model.kv_bytes
                model.kv_bytes = size
                yield self._resized(model, size, now)

    def _resized(self, model: HostedState, size: int, now: float) -> ResizeAction:
        self.resized_at = now
        model.resized_to = size
        return ResizeAction(model.key, size)

    def _sizes(self, coming: HostedState | None) -> dict[ModelKey, int]:
        """Returns the sizes of all caches. `coming` gets a process, and a cache if its wake is
        wanted.
        """
        resident = {each.key: each.memory for each in self.models.values() if each.has_process}
        hot = {each.key for each in self.models.values() if each.state in HAS_KV}
        if coming is not None:
            resident[coming.key] = coming.memory
            hot |= {coming.key} if coming.is_wake_wanted else set()
        return kv_sizes(self.budget_bytes, resident.values(), hot)

    # ── standby ──────────────────────────────────────────────────────────────────────────────────

    def next_standby(self, now: float) -> HostedState | None:
        """Returns the cold model that is started next, of those that fit in standby
        beside all others.
        """
        if now < self.lost_until:
            return None
        cold = [self._planned(each) for each in self.models.values() if each.is_startable(now)]
        resident = [each.memory for each in self.models.values() if each.has_process]
        starts = standby_starts(cold, self.budget_bytes, resident, self.hot())
        return self.models[starts[0]] if starts else None

    def start_standby(self, now: float) -> Iterator[Action]:
        model = self.next_standby(now)
        free = self.budget_bytes - self.used_bytes
        if model is not None and free >= model.memory.fixed_bytes:
            model.memory = self._planned(model)
            model.enter("starting", now)
            yield StartAction(model.key, self.name, None)


def _is_worth_moving(model: HostedState, size: int) -> bool:
    return abs(size - model.resized_to) > RESIZE_SHARE * max(1, model.resized_to)
