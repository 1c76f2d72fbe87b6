"""A host process: the real decisions of a host, and workers that it starts, wakes and parks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from services.host.budget import ModelKey, ModelMemory
from services.host.hosted_model import (
    Action,
    HostedState,
    KillAction,
    ParkAction,
    ResizeAction,
    StartAction,
    StopAction,
    WakeAction,
)
from services.host.model_states import HostStates
from shared import subjects
from shared.errors import HearthError, WorkerBusy
from shared.lifecycle.heartbeat import HealthMonitor, Loads
from shared.messages import (
    DeviceMemory,
    Done,
    HostedModel,
    HostLoad,
    KvResized,
    Message,
    ModelCard,
    ModelWaking,
    ParkModel,
    ParkWorker,
    ResizeKv,
    WakeModel,
    WakeWorker,
)
from tests.simulation.plan import FaultKind, HostedPlan
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.process import ProcessClock, SimulatedProcess
from tests.support.world.randomness import SeededRandomness
from tests.support.world.workers import REVISION, SimulatedWorker

if TYPE_CHECKING:
    from tests.simulation.world.members import Member

POLL_S = 0.05
DRAIN_S = 20.0  # of a worker that parks
REPLY_S = 5.0
WORKER_BYTES = 1_000_000
DEVICE = "cpu"

StartWorker = Callable[[str, str, int], "Awaitable[Member]"]  # its id, model, bytes of KV


class SimulatedHost:
    def __init__(
        self,
        network: SimulatedNetwork,
        process_id: str,
        plan: HostedPlan,
        *,
        seed: int,
        floor_bytes: int,
        start_worker: StartWorker,
    ) -> None:
        self.process = SimulatedProcess(process_id)
        self.bus = network.bus(process_id, self.process)
        self.budget_bytes = plan.num_resident * WORKER_BYTES + plan.num_hot * floor_bytes
        self.states = HostStates({DEVICE: self.budget_bytes})
        self.fault: FaultKind | None = None
        self.workers: dict[str, Member] = {}
        self._plan, self._floor_bytes, self._start_worker = plan, floor_bytes, start_worker
        self._cards: dict[str, ModelCard] = {}
        self._clock = ProcessClock(self.process)
        self.health_monitor = HealthMonitor(
            self.bus,
            self._clock,
            SeededRandomness(seed),
            roles=("host",),
            loads=Loads(host=self._load),
        )

    @property
    def used_bytes(self) -> int:
        """What its workers have, whatever it believes."""
        workers = [each.host for each in self.workers.values() if each.is_up]
        return sum(
            WORKER_BYTES + each.worker.loop.kv.num_bytes
            for each in workers
            if isinstance(each, SimulatedWorker)
        )

    def leaks(self) -> list[str]:
        return []

    # ── lifecycle ────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        for model in self._plan.models:
            self.add_model(model)
        subject = subjects.host_models(self.process.process_id)
        await self.bus.serve(subject, WakeModel | ParkModel, self._serve)
        await self.health_monitor.start()
        await self.health_monitor.transition_to("ready")
        self.process.start(self._run())

    async def drain(self) -> None:
        await self.health_monitor.transition_to("draining")

    async def stop(self) -> None:
        await self.health_monitor.stop()
        await self.bus.close()

    def drop_links(self) -> None:
        """Its workers die with it."""
        for member in self.workers.values():
            if member.is_up:
                member.is_up = False
                member.vanish()

    # ── the registry ─────────────────────────────────────────────────────────────────────────────

    def add_model(self, model: str) -> None:
        memory = ModelMemory(
            key=_key(model),
            weights_bytes=WORKER_BYTES,
            process_bytes=0,
            kv_floor_bytes=self._floor_bytes,
            kv_ceiling_bytes=2 * self._floor_bytes,
        )
        times = {"wake_s": self._plan.wake_s, "start_s": self._plan.start_s}
        self.states.put(memory, self._clock.now(), is_known=True, **times)

    def remove_model(self, model: str) -> None:
        self.states.remove(_key(model))

    # ── requests and events ──────────────────────────────────────────────────────────────────────

    async def _serve(self, message: WakeModel | ParkModel) -> ModelWaking | Done:
        key = ModelKey(message.model, message.revision)
        if isinstance(message, WakeModel):
            reply = self.states.wake(key, self._clock.now())
            self._advance()
            return reply
        for action in self.states.park(key, self._clock.now()):
            await self._carry_out(action)
        found = self.states.find(key)
        if found is not None and found.state == "hot":
            raise WorkerBusy(f"{key} serves requests")
        self._advance()
        return Done()

    def _load(self) -> HostLoad:
        device = self.states.devices[DEVICE]
        return HostLoad(
            devices=(
                DeviceMemory(
                    device=DEVICE, budget_bytes=self.budget_bytes, used_bytes=device.used_bytes
                ),
            ),
            models=tuple(
                self._hosted(each) for each in device.models.values() if not each.is_removed
            ),
        )

    def _hosted(self, model: HostedState) -> HostedModel:
        name = model.key.name
        return HostedModel(
            name=name,
            revision=model.key.revision,
            state=model.state,
            device=DEVICE,
            card=self._cards.get(name),
            worker_id=self._worker_id(name) if model.has_process else None,
            weights_bytes=WORKER_BYTES,
            kv_bytes=model.kv_bytes,
            kv_floor_bytes=self._floor_bytes,
            wake_s=model.wake_s,
            start_s=model.start_s,
            hot_s=self._clock.now() - model.hot_since if model.state == "hot" else 0.0,
            failure=model.failure,
            public_failure=model.public_failure,
        )

    def _worker_id(self, model: str) -> str:
        return f"{self.process.process_id}-{model}"

    # ── what it does ─────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        while True:
            self._advance()
            await self._clock.sleep(POLL_S)

    def _advance(self) -> None:
        for action in self.states.next_actions(self._clock.now()):
            self.process.start(self._carry_out(action))

    async def _carry_out(self, action: Action) -> None:
        model = action.key.name
        try:
            match action:
                case StartAction(kv_bytes=kv_bytes):
                    await self._start(model, kv_bytes)
                case WakeAction(kv_bytes=kv_bytes):
                    await self._wake(model, kv_bytes)
                case ParkAction():
                    await self._command(model, ParkWorker(drain_s=DRAIN_S), Done)
                    self.states.standby(action.key, self._clock.now())
                case ResizeAction(kv_bytes=kv_bytes):
                    reply = await self._command(model, ResizeKv(kv_bytes=kv_bytes), KvResized)
                    self.states.resized(action.key, reply.kv_bytes)
                case StopAction():
                    await self.workers[model].terminate()
                    self._ended(model, "stopped")
                case KillAction(reason=reason):
                    await self._kill(model, reason)
        except WorkerBusy:
            self.states.hot(action.key, self._clock.now())
        except HearthError as error:
            if not self._is_up(model):
                self._ended(model, error.message)
            elif isinstance(action, ResizeAction):
                return  # told again with the next change
            else:
                await self._kill(model, error.message)

    async def _start(self, model: str, kv_bytes: int | None) -> None:
        await self._clock.sleep(self._plan.start_s)
        member = await self._start_worker(self._worker_id(model), model, kv_bytes or 0)
        self.workers[model] = member
        assert isinstance(member.host, SimulatedWorker)
        self._cards[model] = member.host.worker.served.card
        if kv_bytes is None:
            self.states.standby(_key(model), self._clock.now())
        else:
            await self._is_hot(model)

    async def _wake(self, model: str, kv_bytes: int) -> None:
        if self.fault == "wake_hangs":
            return
        await self._clock.sleep(self._plan.wake_s)
        await self._command(model, WakeWorker(kv_bytes=kv_bytes), Done)
        await self._is_hot(model)

    async def _is_hot(self, model: str) -> None:
        self.states.hot(_key(model), self._clock.now())
        if self.fault == "dies_after_wake":
            await self._kill(model, "killed")

    async def _command(self, model: str, command: Message, reply_type: type) -> object:
        subject = subjects.lifecycle("decode", self._worker_id(model))
        timeout_s = REPLY_S + (DRAIN_S if isinstance(command, ParkWorker) else 0.0)
        return await self.bus.request(subject, command, reply_type, timeout_s=timeout_s)

    async def _kill(self, model: str, reason: str) -> None:
        if self._is_up(model):
            await self.workers[model].kill()
        self._ended(model, reason)

    def _ended(self, model: str, reason: str) -> None:
        self.states.ended(_key(model), reason, self._clock.now())

    def _is_up(self, model: str) -> bool:
        return model in self.workers and self.workers[model].is_up


def _key(model: str) -> ModelKey:
    return ModelKey(model, REVISION)
