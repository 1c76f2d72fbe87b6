"""Parks a worker and wakes it again: gives its KV cache back, and keeps weights and kernels.
Changes its roles, as `shared/lifecycle/worker_roles.py` allows.

    start ──▶ ready ──ParkWorker──▶ draining ──all requests have ended──▶ standby ◀── start, parked
                ▲ ▲                    └─drain_s─▶ ready, WorkerBusy         │
                │ └──────────────────────────WakeWorker──────────────────────┘
                └─ResizeKv─┘

A worker that leaves the fleet stays draining, from any state. One that DrainWorker drains
(`drained_worker.py`) does so until that is undone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from services.worker.drained_worker import DrainedWorker, Handler
from shared.engine.worker import EngineWorker
from shared.errors import InvalidRequest, WorkerBusy
from shared.messages import (
    ChangeRoles,
    Done,
    DrainState,
    DrainWorker,
    KvResized,
    ParkWorker,
    ProcessState,
    ResizeKv,
    WakeWorker,
)
from shared.subjects import lifecycle

log = structlog.get_logger(__name__)

POLL_S = 0.02


class RoleAndStandby:
    def __init__(self, worker: EngineWorker, handlers: Sequence[Handler]) -> None:
        self._worker = worker
        self._handlers = handlers
        self._changing = asyncio.Lock()
        self._is_leaving = False
        self._drained = DrainedWorker(worker.clock, handlers)

    @property
    def _state(self) -> ProcessState:
        return self._worker.health_monitor.state

    @property
    def _resting_state(self) -> ProcessState:
        return "ready" if self._worker.loop.engine.pool.num_blocks else "standby"

    async def start(self) -> None:
        """Announces the worker, whose handlers serve: ready, or in standby without a KV cache."""
        for role in self._worker.roles.handled:  # peers know the worker by one of them
            await self._worker.bus.serve(
                lifecycle(role, self._worker.worker_id),
                ParkWorker | WakeWorker | ResizeKv | ChangeRoles | DrainWorker,
                self._on_command,
            )
        await self._worker.health_monitor.transition_to(self._resting_state)

    async def leave(self) -> None:
        """Stops accepting requests and commands."""
        self._is_leaving = True
        await self._worker.health_monitor.transition_to("draining")

    async def _on_command(
        self, command: ParkWorker | WakeWorker | ResizeKv | ChangeRoles | DrainWorker
    ) -> Done | KvResized | DrainState:
        if isinstance(command, ChangeRoles):
            return await self._change_roles(command)
        if isinstance(command, DrainWorker):
            return await self._drain(command)
        async with self._changing:
            self._check_staying()
            match command:
                case ParkWorker(drain_s=drain_s):
                    return await self._park(drain_s)
                case WakeWorker(kv_bytes=kv_bytes):
                    return await self._wake(kv_bytes)
                case ResizeKv(kv_bytes=kv_bytes):
                    return await self._resize(kv_bytes)

    async def _change_roles(self, command: ChangeRoles) -> Done:
        """Changes the roles. A worker in standby has the new roles once it is woken. Raises
        WorkerBusy.
        """
        if self._state == "draining":
            raise WorkerBusy(f"{self._worker.worker_id} is draining")
        await self._worker.change_roles(command)
        return Done()

    async def _drain(self, command: DrainWorker) -> DrainState:
        """Begins, goes on with or undoes a drain. A worker that leaves stays as it is."""
        state = self._drained.drain(command)
        expected = self._resting_state if command.is_undone else "draining"
        if not self._is_leaving and self._state != expected:
            await self._worker.health_monitor.transition_to(expected)
        return state

    def _check_staying(self) -> None:
        if self._is_leaving:
            raise WorkerBusy(f"{self._worker.worker_id} is stopping")
        if self._drained.is_draining:
            raise WorkerBusy(f"{self._worker.worker_id} is drained: `hearth drain --undo` ends it")

    async def _park(self, drain_s: float) -> Done:
        """Parks the worker. Raises WorkerBusy if a request still runs after `drain_s`."""
        if self._state == "standby":
            return Done()
        await self._worker.health_monitor.transition_to("draining")
        try:
            await self._end_requests(drain_s)
            await self._worker.drop_cache()
        except BaseException:
            if not self._is_leaving and not self._drained.is_draining:
                await self._worker.health_monitor.transition_to(self._resting_state)
            raise
        return await self._announce("standby")

    async def _end_requests(self, drain_s: float) -> None:
        worker = self._worker
        deadline = worker.clock.now() + drain_s
        worker.pins.stop()  # prefills of pins are nobody's request
        while (num_left := self._num_unfinished) or not worker.loop.engine.is_idle:
            if worker.clock.now() >= deadline:
                raise WorkerBusy(
                    f"{worker.worker_id} still has {max(1, num_left)} requests after {drain_s:g} s"
                )
            await worker.clock.sleep(POLL_S)
            self._check_staying()

    @property
    def _num_unfinished(self) -> int:
        return sum(handler.num_unfinished for handler in self._handlers)

    async def _wake(self, kv_bytes: int) -> Done:
        """Wakes the worker. Raises InvalidRequest for a size that it cannot serve with, NoCapacity
        without memory.
        """
        if self._state == "ready":
            return Done()
        if not kv_bytes:
            raise InvalidRequest("kv_bytes 0: a worker without a KV cache is parked")
        await self._worker.loop.kv.resize(kv_bytes)
        return await self._announce("ready")

    async def _announce(self, state: ProcessState) -> Done:
        """Announces a state. Raises WorkerBusy if the worker has begun to leave."""
        self._check_staying()
        await self._worker.health_monitor.transition_to(state)
        log.info("kv_resized", state=state, kv_bytes=self._worker.loop.kv.num_bytes)
        return Done()

    async def _resize(self, kv_bytes: int) -> KvResized:
        """Changes the size of the KV cache. Raises InvalidRequest for a size that it cannot serve
        with, or cannot change to now.
        """
        if self._state != "ready":
            raise InvalidRequest(f"{self._worker.worker_id} is {self._state}: it has no KV cache")
        if not kv_bytes:
            raise InvalidRequest("kv_bytes 0: park a worker that needs no KV cache")
        await self._worker.loop.kv.resize(kv_bytes)
        self._worker.loop.wake()
        return KvResized(kv_bytes=self._worker.loop.kv.num_bytes)
