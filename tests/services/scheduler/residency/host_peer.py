"""A peer that sends heartbeats like a host, and whose models' workers are peers of the rig."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from shared import subjects
from shared.lifecycle.heartbeat import HealthMonitor, Loads
from shared.messages import (
    DeviceMemory,
    Done,
    HostedModel,
    HostLoad,
    ModelState,
    ModelWaking,
    ParkModel,
    WakeModel,
)
from tests.services.scheduler.rig import Rig, Worker, eventually, hash_of
from tests.support.world.clock import VirtualClock
from tests.support.world.randomness import SeededRandomness

WEIGHTS, FLOOR = 10, 20


@dataclass
class HostPeer:
    """Memory for the weights of all models, and for the cache of `num_hot`."""

    rig: Rig
    host_id: str
    models: dict[str, ModelState]
    num_hot: int = 1
    wake_s: float = 0.2
    start_s: float = 3.0
    region: str = ""
    on_wake: Callable[[WakeModel], None] = lambda message: None  # may raise
    woken: list[str] = field(default_factory=list)
    parked: list[str] = field(default_factory=list)
    workers: dict[str, Worker] = field(default_factory=dict)
    never_ends: bool = False

    async def join(self) -> HostPeer:
        self.bus = self.rig.network.bus(self.host_id)
        self.hosted = {
            name: HostedModel(
                name=name,
                revision="r1",
                state=state,
                device="cpu",
                weights_bytes=WEIGHTS,
                kv_floor_bytes=FLOOR,
                wake_s=self.wake_s,
                start_s=self.start_s,
            )
            for name, state in self.models.items()
        }
        self.health_monitor = HealthMonitor(
            self.bus,
            VirtualClock(),
            SeededRandomness(hash_of(self.host_id)),
            roles=("host",),
            region=self.region,
            loads=Loads(host=self.load),
        )
        subject = subjects.host_models(self.host_id)
        await self.bus.serve(subject, WakeModel | ParkModel, self._serve)
        await self.health_monitor.start()
        await self.health_monitor.transition_to("ready")
        live = self.rig.service.health_monitor.fleet
        await eventually(lambda: any(each.process_id == self.host_id for each in live.live("host")))
        return self

    def load(self) -> HostLoad:
        has_process = [each for each in self.hosted.values() if each.state != "cold"]
        used = sum(WEIGHTS + each.kv_bytes for each in has_process)
        budget = WEIGHTS * len(self.hosted) + FLOOR * self.num_hot
        device = DeviceMemory(device="cpu", budget_bytes=budget, used_bytes=used)
        return HostLoad(devices=(device,), models=tuple(self.hosted.values()))

    async def make_hot(self, name: str, **options: object) -> Worker:
        worker_id = f"{self.host_id}-{name}"
        self._set(name, state="hot", kv_bytes=FLOOR, worker_id=worker_id, hot_s=100.0)
        if name in self.workers:
            await self.workers[name].health_monitor.transition_to("ready")
        else:
            options |= {"model": name, "region": self.region}
            self.workers[name] = await self.rig.worker(worker_id, **options)
        await self.health_monitor.transition_to("ready")  # a heartbeat
        return self.workers[name]

    async def _serve(self, message: WakeModel | ParkModel) -> ModelWaking | Done:
        name = message.model
        if isinstance(message, ParkModel):
            self.parked.append(name)
            await self.workers[name].health_monitor.transition_to("standby")
            self._set(name, state="standby", kv_bytes=0)
            return Done()
        self.on_wake(message)
        self.woken.append(name)
        is_cold = self.hosted[name].state == "cold"
        ready_in_s = self.start_s if is_cold else self.wake_s
        self._set(name, state="starting" if is_cold else "waking")
        if not self.never_ends:
            self._task = asyncio.create_task(self._end_wake(name, ready_in_s))
        return ModelWaking(state=self.hosted[name].state, ready_in_s=ready_in_s)

    async def _end_wake(self, name: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self.make_hot(name)

    def _set(self, name: str, **changes: object) -> None:
        self.hosted[name] = replace(self.hosted[name], **changes)
