"""A common interface of a simulated fleet's processes: start, drain, kill."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from shared.lifecycle.heartbeat import HealthMonitor
from tests.simulation.world.gateway import SimulatedGateway
from tests.simulation.world.hosts import SimulatedHost
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.services import SimulatedIndex, SimulatedScheduler
from tests.support.world.workers import SimulatedWorker


def health_monitor_of(host: AnyHost) -> HealthMonitor:
    match host:
        case SimulatedGateway():
            return host.health_monitor
        case SimulatedWorker():
            return host.worker.health_monitor
        case SimulatedHost():
            return host.health_monitor
        case _:
            return host.service.health_monitor


AnyHost = SimulatedGateway | SimulatedScheduler | SimulatedIndex | SimulatedWorker | SimulatedHost


class Member:
    """One process id across all its restarts."""

    def __init__(self, network: SimulatedNetwork, host: AnyHost) -> None:
        self.host = host
        self.process_id = host.process.process_id
        self.is_up = False
        self._network = network

    async def start(self) -> None:
        self.is_up = True
        await self._do(self.host.start())

    async def terminate(self) -> None:
        """SIGTERM: drains, then stops, unless it is killed meanwhile."""
        host = self.host
        await self._do(host.drain())
        if not host.process.is_dead:
            await self._do(host.stop())
        if not host.process.is_dead:
            self.is_up = False
            self.vanish()
            await host.process.gone()

    async def _do(self, act: Coroutine[Any, Any, None]) -> None:
        """Returns early if the process is killed."""
        task = self.host.process.start(act)
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    async def kill(self) -> None:
        """SIGKILL."""
        self.is_up = False
        self.vanish()
        await self.host.bus.close()
        await self.host.process.gone()

    def vanish(self) -> None:
        self.host.process.die()
        self._network.remove_all(self.host.process)
        self.host.drop_links()
