"""Decides the next actions of a host: pure, with the time as an argument.

The shell reports requests and events, and carries out `next_actions`. On each device one model at a
time becomes hot; other wakes wait, in order of priority and then of arrival. While none waits,
models are started into standby, one at a time on the host, and caches change their sizes.

Only the scheduler parks models. For a wake, a host makes the caches of hot models smaller and ends
processes in standby; a wake that needs a hot model's place is refused with NoCapacity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from services.host.budget import ModelKey, ModelMemory, choose_device, never_fits, size_text
from services.host.device_models import DeviceModels
from services.host.hosted_model import (
    HAS_KV,
    WORKER_ENDS,
    Action,
    HostedState,
    KillAction,
    ParkAction,
    StopAction,
)
from shared.errors import NoCapacity, UnknownModel, WorkerBusy
from shared.messages import ModelWaking

TO_STANDBY = frozenset({"starting", "parking", "standby"})
PARKABLE_RETRY_S = 1.0  # time until a scheduler may have parked a model


class HostStates:
    """The states of all models of a host. A removed model stays until its process has ended."""

    def __init__(self, budgets: Mapping[str, int], offload_bytes: int = 0) -> None:
        """`budgets` are bytes by device; `offload_bytes` those of the host's memory for weights of
        parked models, promised to each whose process starts while they last.
        """
        self.offload_bytes = offload_bytes
        self.devices = {
            name: DeviceModels(name, each, self._offload_room) for name, each in budgets.items()
        }

    @property
    def budgets(self) -> dict[str, int]:
        return {name: each.budget_bytes for name, each in self.devices.items()}

    def models(self) -> Iterator[HostedState]:
        return (each for device in self.devices.values() for each in device.models.values())

    def _offload_room(self) -> int:
        return self.offload_bytes - sum(each.memory.offloaded_bytes for each in self.models())

    def find(self, key: ModelKey) -> HostedState | None:
        return next((each for each in self.models() if each.key == key), None)

    # ── the registry ─────────────────────────────────────────────────────────────────────────────

    def put(
        self,
        memory: ModelMemory,
        now: float,
        *,
        is_known: bool = False,
        wake_s: float | None = None,
        start_s: float | None = None,
    ) -> None:
        """Adds a model to the device with the most room, or changes the memory of a known one."""
        found = self.find(memory.key)
        if found is None:
            free = {name: each.unclaimed_bytes for name, each in self.devices.items()}
            found = HostedState(memory, choose_device(free), since=now)
            self.devices[found.device].models[memory.key] = found
        found.memory = msgspec.structs.replace(
            memory,
            need=found.memory.need,
            used_at=max(memory.used_at, found.memory.used_at),
            offloaded_bytes=memory.weights_bytes if found.memory.offloaded_bytes else 0,
        )
        found.is_removed = False
        found.is_known = found.is_known or is_known
        found.wake_s = found.wake_s if wake_s is None else wake_s
        found.start_s = found.start_s if start_s is None else start_s
        if (reason := never_fits(memory, self.budgets)) is not None:
            needed, largest = memory.least_hot_bytes, max(self.budgets.values())
            over = f"its memory of {size_text(needed)} is over the budget of {size_text(largest)}"
            self.fail(memory.key, reason, over, now)

    def restore(self, key: ModelKey, now: float) -> None:
        """Tries a failed model again at once, because its record has changed."""
        model = self.find(key)
        if model is not None and not model.has_process:
            model.is_final, model.retry_at = False, now
            model.failure = model.public_failure = ""
            if model.state == "failed":
                model.enter("cold", now)

    def remove(self, key: ModelKey) -> None:
        """Removes a model. Its worker finishes its running requests, and ends."""
        if (model := self.find(key)) is not None:
            model.is_removed, model.is_wake_wanted = True, False
            if not model.has_process:
                del self.devices[model.device].models[key]

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def wake(self, key: ModelKey, now: float) -> ModelWaking:
        """Requests that a model becomes hot. Idempotent. Raises UnknownModel, and NoCapacity, with
        a retry time if that may change.
        """
        model = self._of(key)
        if model.state == "failed":
            wait_s = None if model.is_final else model.expected_s(now)
            reason = f"the model {key.name!r} cannot be served: {model.public_failure}"
            raise NoCapacity(reason, retry_after_s=wait_s)
        if model.state != "hot" and not (model.is_wake_wanted or model.is_becoming_hot):
            self._place(model, now)
            model.want(now)
        return ModelWaking(state=model.state, ready_in_s=self.ready_in_s(key, now))

    def ready_in_s(self, key: ModelKey, now: float) -> float:
        """Returns the expected seconds until the model is hot, after the earlier
        wakes on its device.
        """
        model = self._of(key)
        ahead_s = 0.0
        if model.state != "hot" and not model.is_becoming_hot:
            device = self.devices[model.device]
            ahead_s = sum(each.expected_s(now) for each in device.becoming_hot())
            for each in device.wanted():
                if each.key == key:
                    break
                ahead_s += each.expected_s(now)
        return ahead_s + model.expected_s(now)

    def park(self, key: ModelKey, now: float) -> list[Action]:
        """Returns what to do: nothing if it has no cache, or parks already.

        Raises UnknownModel, and WorkerBusy for a model that is becoming hot.
        """
        model = self._of(key)
        if model.is_becoming_hot:
            raise WorkerBusy(f"model {key} is {model.state}")
        model.is_wake_wanted = False
        if model.state != "hot":
            return []
        model.enter("parking", now)
        return [ParkAction(key)]

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def standby(self, key: ModelKey, now: float) -> None:
        """Records that the worker has no cache: it has parked, or was started in standby."""
        if (model := self.find(key)) and model.state in ("starting", "parking"):
            if model.state == "parking":
                model.used(now)
            model.enter("standby", now)
            self.devices[model.device].num_losses = 0

    def hot(self, key: ModelKey, now: float) -> None:
        """Records that the worker serves. A model that was parking is hot again: its worker refused
        to park.
        """
        if (model := self.find(key)) and model.state in ("starting", "waking", "parking"):
            hot_since = model.hot_since if model.state == "parking" else now
            model.enter("hot", now)
            model.hot_since = hot_since
            self.devices[model.device].num_losses = 0

    def wake_refused(self, key: ModelKey, reason: str, now: float) -> None:
        """Records that a worker has no memory to wake in."""
        if (model := self.find(key)) and model.state == "waking":
            model.refused(reason, now)

    def offloaded(self, key: ModelKey, num_bytes: int) -> None:
        """Records what a worker in standby reports: its host may have had too little memory."""
        if (model := self.find(key)) and model.device != "cpu" and model.state in TO_STANDBY:
            moved = model.memory.weights_bytes if num_bytes else 0
            model.memory = msgspec.structs.replace(model.memory, offloaded_bytes=moved)

    def resized(self, key: ModelKey, kv_bytes: int) -> None:
        """Records the worker's cache size, which may already be outdated: it may have been told to
        grow.
        """
        if (model := self.find(key)) and model.state in HAS_KV:
            model.kv_bytes = max(kv_bytes, model.resized_to)

    def ended(self, key: ModelKey, reason: str, now: float, *, lost_device: bool = False) -> None:
        """Records the end of a worker, and with `lost_device` the failure of its device."""
        model = self.find(key)
        if model is None or not model.has_process:
            return
        if model.state == "hot":
            model.used(now)
        if lost_device:
            self.devices[model.device].lose(now)
            reason = f"device {model.device} was lost: {reason}"
        model.ended(reason, now, "its device was lost" if lost_device else WORKER_ENDS)
        if model.is_removed:
            del self.devices[model.device].models[key]

    def fail(self, key: ModelKey, reason: str, public_reason: str, now: float) -> None:
        """Fails a model until `restore`. A worker that it has is stopped."""
        if (model := self.find(key)) is not None:
            model.failure, model.public_failure = reason, public_reason
            model.is_final, model.is_wake_wanted = True, False
            if model.state == "cold":
                model.enter("failed", now)

    def set_need(self, key: ModelKey, need: float) -> None:
        if (model := self.find(key)) is not None:
            model.memory = msgspec.structs.replace(model.memory, need=need)

    def stalled(self, duration_s: float) -> None:
        """Extends all limits by the time for which this host was frozen, so that no worker is
        given up for it.
        """
        for model in self.models():
            model.since += duration_s

    # ── what to do ───────────────────────────────────────────────────────────────────────────────

    def next_actions(self, now: float) -> list[Action]:
        """Returns what the shell must begin now. The states change as if it had begun."""
        actions = [*self._give_up(now), *self._stop_unwanted(now)]
        for device in self.devices.values():
            actions += device.correct(now)
            actions += device.advance_wakes(now)
            actions += device.resize(now)
        return [*actions, *self._start_standby(now)]

    def _give_up(self, now: float) -> Iterator[Action]:
        for model in self.models():
            if now - model.since > model.limit_s() and not model.is_killed:
                model.is_killed = True
                yield KillAction(model.key, f"{model.state} for {now - model.since:.0f} s")

    def _stop_unwanted(self, now: float) -> Iterator[Action]:
        for model in self.models():
            is_unwanted = model.is_removed or model.is_final
            if is_unwanted and model.has_process and model.state != "stopping":
                model.enter("stopping", now)
                yield StopAction(model.key)

    def _start_standby(self, now: float) -> Iterator[Action]:
        """Starts one model in standby, while no model waits to be hot: both need the processors."""
        devices = self.devices.values()
        if any(each.wanted() for each in devices):
            return
        for device in devices:
            if any(each.state == "starting" for each in self.models()):
                return
            yield from device.start_standby(now)

    # ─────────────────────────────────────────────────────────────────────────────────────────────

    def _place(self, model: HostedState, now: float) -> None:
        """Moves a model without a process to the device with the least in its way. Raises
        NoCapacity if it would not fit there.
        """
        devices = list(self.devices.values())
        if model.has_process:
            devices = [self.devices[model.device]]
        rooms = [(each, each.room(model)) for each in devices]
        device, room = min(
            rooms,
            key=lambda pair: (
                now < pair[0].lost_until,
                pair[1].missing_bytes,
                len(pair[1].stops),
                pair[0].name != model.device,
            ),
        )
        if now < device.lost_until:
            wait_s = device.lost_until - now + model.expected_s(now)
            raise NoCapacity(f"device {device.name} was lost", retry_after_s=wait_s)
        if room.missing_bytes:
            raise NoCapacity(
                f"device {device.name} lacks {size_text(room.missing_bytes)} for model "
                f"{model.key}: {len(device.hot())} models are hot there",
                retry_after_s=PARKABLE_RETRY_S,
            )
        if device.name != model.device:
            del self.devices[model.device].models[model.key]
            device.models[model.key] = model
            model.device = device.name

    def _of(self, key: ModelKey) -> HostedState:
        found = self.find(key)
        if found is None or found.is_removed:
            raise UnknownModel(f"this host does not have the model {key}")
        return found
