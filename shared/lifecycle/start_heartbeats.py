"""Sends the heartbeats of a worker that loads its model, so that operators see it while it starts.

    start() ──▶ loading ⇄ compiling ──stop()──▶ HealthMonitor goes on with the same numbers
                    └──────leave()──▶ stopped, after a failed start

Peers send it no work: its state is "starting", which every release knows, and the phase is beside
it. It receives nothing: imports hold its event loop up, and it would take its peers for silent.
"""

from __future__ import annotations

from socket import gethostname

import structlog

from shared.background import Background
from shared.clock import Clock
from shared.errors import HearthError
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S
from shared.lifecycle.heartbeat_numbers import HeartbeatNumbers
from shared.lifecycle.release import installed_release
from shared.lifecycle.worker_roles import WorkerRoles
from shared.messages import Alive, Heartbeat, ProcessState, ReportAlive, StartProgress
from shared.subjects import alive, heartbeat
from shared.transport.bus import Bus, Unsubscribe

log = structlog.get_logger(__name__)


class StartHeartbeats:
    """Announces `model`, by its name, in the phase "loading" and those that `enter` names."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        numbers: HeartbeatNumbers,
        roles: WorkerRoles,
        *,
        region: str,
        model: str,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._numbers = numbers
        self._roles = roles
        self._region = region
        self._progress = StartProgress(phase="loading", model=model)
        self._host_name = gethostname()
        self._began_at = clock.now()
        self._background = Background()
        self._unsubscribe: list[Unsubscribe] = []

    async def start(self) -> None:
        log.info(self._progress.phase, model=self._progress.model)
        for role in self._roles.possible or self._roles.current[:1]:
            subject = alive(role, self._bus.process_id)
            self._unsubscribe.append(
                await self._bus.serve(subject, ReportAlive, lambda _: self._alive())
            )
        self._background.start_own(self._beat())

    def enter(self, phase: str) -> None:
        """Announces a phase with the next heartbeat. Called by the thread that loads."""
        if phase != self._progress.phase:
            after_s = round(self._clock.now() - self._began_at, 1)
            log.info(phase, model=self._progress.model, after_s=after_s)
            self._progress = StartProgress(phase=phase, model=self._progress.model)

    async def stop(self) -> None:
        """Ends the heartbeats. Whoever goes on with them must have begun."""
        await self._background.stop()
        for each in self._unsubscribe:
            await each()
        self._unsubscribe.clear()

    async def leave(self) -> None:
        """Announces the end of a start that failed."""
        await self.stop()
        await self._send("stopped")

    def _alive(self) -> Alive:
        uptime_s = self._clock.now() - self._began_at
        return Alive(epoch=self._numbers.epoch, host=self._host_name, uptime_s=uptime_s)

    async def _beat(self) -> None:
        while True:
            await self._send("starting")
            await self._clock.sleep(HEARTBEAT_INTERVAL_S)

    async def _send(self, state: ProcessState) -> None:
        roles, process_id = self._roles.current, self._bus.process_id
        message = Heartbeat(
            process_id=process_id,
            epoch=self._numbers.epoch,
            sequence_number=self._numbers.take(),
            roles=roles,
            state=state,
            interval_s=HEARTBEAT_INTERVAL_S,
            region=self._region,
            uptime_s=self._clock.now() - self._began_at,
            possible_roles=self._roles.possible,
            release=installed_release(),
            host_name=self._host_name,
            starting=self._progress if state == "starting" else None,
        )
        try:
            await self._bus.publish(heartbeat(roles, process_id, self._region), message)
        except HearthError as error:
            log.debug("heartbeat_send_failed", error=error.message)
