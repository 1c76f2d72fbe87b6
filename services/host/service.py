"""The host process: owns the devices of a machine, and starts, parks, wakes and stops the workers
of all models in the registry within a memory budget for each device.

    registry ──▶ HostedRevisions ──▶ HostStates ──actions──▶ Workers, WorkerControl
    scheduler ──WakeModel, ParkModel──▶ ▲ ◀──heartbeats, ends of processes──┘
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path

import structlog

from services.host.admission import HostAdmission
from services.host.budget import ModelKey
from services.host.devices import budgets_of, offload_bytes_of
from services.host.host_load import host_load
from services.host.hosted_model import (
    Action,
    KillAction,
    ParkAction,
    ResizeAction,
    StartAction,
    StopAction,
    WakeAction,
)
from services.host.hosted_revisions import HostedRevision, HostedRevisions
from services.host.model_states import HostStates
from services.host.records import Records, default_state_dir
from services.host.workers.worker_config import log_name_of, worker_config, worker_id_of
from services.host.workers.worker_control import WorkerControl, is_refusal
from services.host.workers.workers import Worker, WorkerProcesses
from shared.background import Background, failing_alone
from shared.clock import Clock, MonotonicClock
from shared.config import HostConfig, check, redis_tls_of
from shared.errors import HearthError, NoCapacity, UnknownModel, WorkerBusy
from shared.lifecycle.heartbeat import HealthMonitor, Loads
from shared.lifecycle.identity import connect
from shared.lifecycle.process import DEVICE_LOST_STATUS
from shared.messages import (
    Done,
    DrainState,
    DrainWorker,
    Heartbeat,
    HostLoad,
    ModelState,
    ModelWaking,
    ParkModel,
    WakeModel,
)
from shared.metrics.process_report import ProcessReport
from shared.model_registry.admin import RegistryAdmin
from shared.model_registry.reader import RegistryReader
from shared.randomness import Randomness, SystemRandomness
from shared.store import RedisStore, Store
from shared.subjects import host_models, random_instance
from shared.transport.bus import Bus

log = structlog.get_logger(__name__)

TICK_S = 0.1
STALLED_S = 2.0  # gap of two ticks: this process was frozen
SILENT_LIMIT_S = 10.0  # silence of a worker that hangs, before it is killed
STORE_TIMEOUT_S = 1.0


class HostService:
    def __init__(
        self,
        config: HostConfig,
        bus: Bus,
        store: Store,
        clock: Clock,
        randomness: Randomness,
        *,
        budgets: dict[str, int],
        offload_bytes: int = 0,
        records: Records,
    ) -> None:
        self._config = config
        self._bus = bus
        self._store = store
        self._clock = clock
        self._records = records
        self.states = HostStates(budgets, offload_bytes)
        self.registry = HostedRevisions(clock, next(iter(budgets)), self._on_source)
        self._reader = RegistryReader(store, clock)
        self._reader.on_change(self._on_registry)
        self._control = WorkerControl(bus)
        self._workers = WorkerProcesses(
            records.directory,
            os.environ,
            clock,
            num_threads=config.num_threads,
            on_end=self._on_end,
        )
        admin = RegistryAdmin(store, time.time)
        self._admission = HostAdmission(self.states, admin, records, clock)
        self._by_worker: dict[str, HostedRevision] = {}
        # makes ids of workers differ from those before a restart, and from other hosts'
        self._run = random_instance()
        self._num_starts = 0
        self._is_leaving = False
        self._is_drained = False
        self._announced: set[tuple[ModelKey, ModelState]] = set()
        self._changed = asyncio.Event()
        self._background = Background()
        self.health_monitor = HealthMonitor(
            bus,
            clock,
            randomness,
            roles=("host",),
            region=config.region,
            loads=Loads(host=self._load, store=store.load),
        )
        self.health_monitor.on_heartbeat(self._on_heartbeat)

    async def start(self) -> None:
        await self.health_monitor.start()
        await self._bus.serve(
            host_models(self._bus.process_id),
            WakeModel | ParkModel | DrainWorker,
            self._on_command,
        )
        await self._workers.start(has_template="cpu" in self.states.devices)
        self._background.start_own(self._reader.run())
        self._background.start_own(self._drive())
        await self.health_monitor.transition_to("ready")

    async def drain(self) -> None:
        """Leaves the fleet. The workers finish their running requests."""
        self._is_leaving = True
        await self.health_monitor.transition_to("draining")
        for worker_id in self._by_worker:
            self._workers.signal(worker_id, signal.SIGTERM)
        while self._by_worker:
            await self._wait_for_change()

    async def stop(self) -> None:
        self._is_leaving = True
        await self._background.stop()
        await self.registry.stop()
        await self._workers.stop()
        await self.health_monitor.stop()
        await self._store.close()
        await self._bus.close()
        self._records.close()

    def report(self) -> ProcessReport:
        return self.health_monitor.report()

    # ── what happens outside ─────────────────────────────────────────────────────────────────────

    def _on_registry(self) -> None:
        changed, gone = self.registry.update(self._reader.models)
        for hosted in gone:
            self.states.remove(hosted.key)
            if self.states.find(hosted.key) is None:
                self.registry.forget(hosted)
        if any(each.key not in self.registry.revisions for each in gone):
            self.registry.update(self._reader.models)  # it has another source now
        for hosted in changed:
            if hosted.source is not None:
                self._put(hosted)
                self.states.restore(hosted.key, self._clock.now())
        for hosted in self.registry.revisions.values():
            with failing_alone("model_not_checked", model=str(hosted.key)):
                self._admission.check(hosted)
        self._changed.set()

    def _on_source(self, hosted: HostedRevision) -> None:
        assert hosted.source is not None
        hosted.record = self._records.read(
            hosted.key,
            source=hosted.revision.source,
            max_context_tokens=hosted.source.max_context_tokens,
        )
        self._put(hosted)
        state = self.states.find(hosted.key)
        if state is not None and state.is_final:
            log.error("model_never_fits", model=str(hosted.key), reason=state.failure)
        self._changed.set()

    def _put(self, hosted: HostedRevision) -> None:
        self._admission.put(hosted)

    def _on_heartbeat(self, message: Heartbeat) -> None:
        hosted = self._by_worker.get(message.process_id)
        if hosted is None:
            return
        hosted.load = message.load
        if message.load is not None:
            needed = message.load.decode_tokens_in_flight + message.load.prefill_tokens_in_flight
            self.states.set_need(hosted.key, needed)
            if message.state == "standby":
                self.states.offloaded(hosted.key, message.load.offloaded_bytes)
        if not hosted.is_admitted and message.state in ("standby", "ready"):
            hosted.is_admitted = True
            self._start_item(hosted, self._admit(hosted, message))

    async def _admit(self, hosted: HostedRevision, message: Heartbeat) -> None:
        await self._admission.admit(hosted, message)
        self._changed.set()

    def _on_end(self, worker: Worker, status: int, reason: str) -> None:
        hosted = self._by_worker.pop(worker.worker_id, None)
        if hosted is None:
            return
        hosted.worker_id, hosted.load, hosted.silent_since = None, None, None
        log.warning("worker_ended", worker=worker.worker_id, model=str(hosted.key), reason=reason)
        is_lost = status == DEVICE_LOST_STATUS
        self.states.ended(hosted.key, reason, self._clock.now(), lost_device=is_lost)
        if self.states.find(hosted.key) is None:
            self._on_registry()
        self._changed.set()

    def _start_item(self, hosted: HostedRevision, work: Coroutine[object, object, None]) -> None:
        self._background.start_item(work, partial(self._fail_item, hosted))

    def _fail_item(self, hosted: HostedRevision, error: Exception) -> None:
        """Kills the worker of the model, whose state is unknown. Without a worker the
        start has failed.
        """
        reason = f"{type(error).__name__}: {error}"
        if hosted.parking is not None and not hosted.parking.done():
            hosted.parking.set_exception(HearthError(reason))
            hosted.parking.exception()  # retrieved: there may be no caller
        hosted.parking = None
        worker_id = hosted.worker_id
        if worker_id is not None and self._workers.has(worker_id):
            self._kill(worker_id)
        else:
            if worker_id is not None:
                self._by_worker.pop(worker_id, None)
            hosted.worker_id = None
            self.states.ended(hosted.key, reason, self._clock.now())
        self._changed.set()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    async def _on_command(
        self, command: WakeModel | ParkModel | DrainWorker
    ) -> ModelWaking | Done | DrainState:
        if isinstance(command, DrainWorker):
            return await self._drain(command)
        if self._is_drained:
            raise WorkerBusy(f"{self._bus.process_id} is drained: `hearth drain --undo` ends it")
        hosted = self.registry.named(command.model, command.revision)
        if hosted is None:
            raise UnknownModel(
                f"this host does not have the model {command.model!r}, "
                f"revision {command.revision!r}"
            )
        if isinstance(command, WakeModel):
            reply = self.states.wake(hosted.key, self._clock.now())
            self._changed.set()
            return reply
        for action in self.states.park(hosted.key, self._clock.now()):
            self._carry_out(action)
        if hosted.parking is not None:
            await asyncio.shield(hosted.parking)
        return Done()

    async def _drain(self, command: DrainWorker) -> DrainState:
        """Starts and wakes nothing until that is undone, and drains the workers that serve. Raises
        HearthError if one does not reply.
        """
        if not self._is_leaving and self._is_drained == command.is_undone:
            self._is_drained = not command.is_undone
            await self.health_monitor.transition_to("draining" if self._is_drained else "ready")
            self._changed.set()
        serving = [each for each in self._by_worker.values() if self._is_hot(each)]
        states = await asyncio.gather(*(self._control.drain(each, command) for each in serving))
        return DrainState(
            num_running=sum(each.num_running for each in states),
            num_pushes=sum(each.num_pushes for each in states),
        )

    def _is_hot(self, hosted: HostedRevision) -> bool:
        state = self.states.find(hosted.key)
        return state is not None and state.state == "hot"

    # ── actions ──────────────────────────────────────────────────────────────────────────────────

    async def _drive(self) -> None:
        ticked_at = self._clock.now()
        while not self._is_leaving:
            stalled_s = self._clock.now() - ticked_at
            if stalled_s > STALLED_S:
                log.warning("host_stalled", seconds=round(stalled_s, 3))
                self.states.stalled(stalled_s)
            ticked_at = self._clock.now()
            self._kill_silent()
            actions = () if self._is_drained else self.states.next_actions(self._clock.now())
            for action in actions:
                with failing_alone("action_failed", model=str(action.key)):
                    self._carry_out(action)
            await self._announce()
            await self._wait_for_change()

    async def _announce(self) -> None:
        """Sends a change at once, not with the next periodic heartbeat."""
        states = {(each.key, each.state) for each in self.states.models()}
        if states != self._announced:
            self._announced = states
            await self.health_monitor.transition_to(self.health_monitor.state)

    async def _wait_for_change(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                await self._changed.wait()
        self._changed.clear()

    def _carry_out(self, action: Action) -> None:
        hosted = self.registry.revisions[action.key]
        match action:
            case StartAction(device=device, kv_bytes=kv_bytes):
                self._start_item(hosted, self._start(hosted, device, kv_bytes))
            case WakeAction(kv_bytes=kv_bytes):
                self._start_item(hosted, self._wake(hosted, kv_bytes))
            case ParkAction():
                hosted.parking = asyncio.get_running_loop().create_future()
                self._start_item(hosted, self._park(hosted, hosted.parking))
            case ResizeAction(kv_bytes=kv_bytes):
                self._start_item(hosted, self._resize(hosted, kv_bytes))
            case StopAction():
                self._signal(hosted, signal.SIGTERM)
            case KillAction(reason=reason):
                log.error("worker_given_up", model=str(hosted.key), reason=reason)
                self._signal(hosted, signal.SIGKILL)

    def _signal(self, hosted: HostedRevision, number: signal.Signals) -> None:
        if hosted.worker_id is not None:
            self._workers.signal(hosted.worker_id, number)

    def _kill(self, worker_id: str | None) -> None:
        """Kills a worker, which may no longer be that of its model."""
        if worker_id is not None:
            self._workers.signal(worker_id, signal.SIGKILL)

    async def _start(self, hosted: HostedRevision, device: str, kv_bytes: int | None) -> None:
        self._num_starts += 1
        worker_id = worker_id_of(
            self._config.worker_nats_url, hosted.key.name, f"{self._run}-{self._num_starts}"
        )
        state = self.states.find(hosted.key)
        assert state is not None
        place = self.states.devices[device]
        config = worker_config(self._config, hosted, state.memory, worker_id, place, kv_bytes)
        hosted.worker_id, hosted.is_admitted = worker_id, False
        hosted.started_at = self._clock.now()
        self._by_worker[worker_id] = hosted
        try:
            check(config)
            worker = await self._workers.launch(config, log_name=log_name_of(hosted.key))
        except HearthError as error:
            self._by_worker.pop(worker_id, None)
            hosted.worker_id = None
            self.states.ended(hosted.key, error.message, self._clock.now())
        else:
            hosted.pid = worker.pid
            log.info("worker_started", worker=worker_id, model=str(hosted.key), kv_bytes=kv_bytes)
            if self._is_leaving or state.state == "stopping":  # since before it had a process
                self._workers.signal(worker_id, signal.SIGTERM)

    async def _wake(self, hosted: HostedRevision, kv_bytes: int) -> None:
        began_at, worker_id = self._clock.now(), hosted.worker_id
        try:
            await self._control.wake(hosted, kv_bytes)
        except NoCapacity as error:  # others use more of the device than was planned
            log.warning("wake_refused", model=str(hosted.key), reason=error.message)
            self.states.wake_refused(hosted.key, error.message, self._clock.now())
        except HearthError as error:
            log.error("wake_failed", model=str(hosted.key), reason=error.message)
            self._kill(worker_id)
        else:
            self.states.hot(hosted.key, self._clock.now())
            self._admission.measured_wake(hosted, self._clock.now() - began_at)
        self._changed.set()

    async def _park(self, hosted: HostedRevision, done: asyncio.Future[None]) -> None:
        worker_id, state = hosted.worker_id, self.states.find(hosted.key)
        offloaded = 0 if state is None else state.memory.offloaded_bytes
        try:
            await self._control.park(hosted, offloaded)
        except HearthError as error:
            done.set_exception(error)
            done.exception()  # retrieved: there may be no caller
            if is_refusal(error):
                self.states.hot(hosted.key, self._clock.now())
            else:
                log.error("park_failed", model=str(hosted.key), reason=error.message)
                self._kill(worker_id)
        else:
            done.set_result(None)
            self.states.standby(hosted.key, self._clock.now())
        hosted.parking = None
        self._changed.set()

    async def _resize(self, hosted: HostedRevision, kv_bytes: int) -> None:
        try:
            found = await self._control.resize(hosted, kv_bytes)
        except HearthError as error:
            log.warning("resize_failed", model=str(hosted.key), reason=error.message)
        else:
            self.states.resized(hosted.key, found)
        self._changed.set()

    def _kill_silent(self) -> None:
        """Kills workers that hang: the fleet has lost them, and they do not come back."""
        now = self._clock.now()
        for worker_id, hosted in self._by_worker.items():
            if not hosted.is_admitted or not self.health_monitor.fleet.is_lost(worker_id):
                hosted.silent_since = None
            elif hosted.silent_since is None:
                hosted.silent_since = now
            elif now - hosted.silent_since > SILENT_LIMIT_S:
                log.error("worker_silent", worker=worker_id, model=str(hosted.key))
                hosted.silent_since = now
                self._workers.signal(worker_id, signal.SIGKILL)

    def _load(self) -> HostLoad:
        return host_load(self.states, self.registry.revisions.values(), self._clock.now())


async def build_host(config: HostConfig) -> HostService:
    """Builds the host's process. Raises ConfigError, DependencyUnavailable."""
    check(config)
    directory = Path(config.state_dir) if config.state_dir else default_state_dir(config.process_id)
    records = Records(directory)
    budgets = await asyncio.to_thread(budgets_of, config.budget)
    offload_bytes = offload_bytes_of(config.parked_weights_bytes, budgets)
    bus = await connect(config, "host")
    clock = MonotonicClock()
    store = RedisStore(config.redis_url, clock, timeout_s=STORE_TIMEOUT_S, tls=redis_tls_of(config))
    return HostService(
        config,
        bus,
        store,
        clock,
        SystemRandomness(),
        budgets=budgets,
        offload_bytes=offload_bytes,
        records=records,
    )
