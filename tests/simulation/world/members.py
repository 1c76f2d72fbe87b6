"""A common interface of a simulated fleet's processes: start, drain, kill."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from services.kv_index.service import KvIndexService
from services.scheduler.service import SchedulerService
from shared.config import KvIndexConfig, SchedulerConfig
from shared.lifecycle.heartbeat import HealthMonitor
from tests.simulation.world.gateway import SimulatedGateway
from tests.simulation.world.hosts import SimulatedHost
from tests.support.world import leaks
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.process import ProcessClock, SimulatedProcess
from tests.support.world.randomness import SeededRandomness
from tests.support.world.store import MemoryStore, ProcessStore
from tests.support.world.workers import SimulatedWorker


def _max_local_prefill_tokens(seed: int) -> int:
    """Most schedulers hand off as much as possible: these prompts are so short that computing them
    on decode is cheaper. The others choose as in production.
    """
    return 4 if seed % 4 else 1_000_000


class SimulatedScheduler:
    def __init__(
        self,
        network: SimulatedNetwork,
        process_id: str,
        *,
        seed: int,
        max_queued_requests: int,
        has_automatic_roles: bool = False,
    ) -> None:
        self.process = SimulatedProcess(process_id)
        self.bus = network.bus(process_id, self.process)
        config = SchedulerConfig(
            nats_url="nats://here",
            process_id=process_id,
            max_queued_requests=max_queued_requests,
            max_local_prefill_tokens=_max_local_prefill_tokens(seed),
            automatic_roles="on" if has_automatic_roles else "off",
            role_change_min_s=0.3,
        )
        clock = ProcessClock(self.process)
        self.service = SchedulerService(config, self.bus, clock, SeededRandomness(seed))
        self.max_queued_requests = max_queued_requests

    async def start(self) -> None:
        await self.service.start()

    async def drain(self) -> None:
        await self.service.drain()

    async def stop(self) -> None:
        await self.service.stop()

    def drop_links(self) -> None:
        """Does nothing: a scheduler has no links."""

    def leaks(self) -> list[str]:
        return leaks.of_scheduler(self.service)


class SimulatedIndex:
    def __init__(
        self, network: SimulatedNetwork, store: MemoryStore, process_id: str, *, seed: int
    ) -> None:
        self.process = SimulatedProcess(process_id)
        self.bus = network.bus(process_id, self.process)
        self._redis = store
        self.is_only_writer = True  # false where a second process of its id has been
        config = KvIndexConfig(
            nats_url="nats://here", process_id=process_id, redis_url="redis://here"
        )
        clock = ProcessClock(self.process)
        self.service = KvIndexService(
            config,
            self.bus,
            ProcessStore(store, self.process),
            clock,
            SeededRandomness(seed),
            wall_clock=lambda: 1_000.0 + clock.now(),
        )

    async def start(self) -> None:
        await self.service.start()

    async def drain(self) -> None:
        await self.service.drain()

    async def stop(self) -> None:
        await self.service.stop()

    def drop_links(self) -> None:
        """Does nothing: an index has no links."""

    def leaks(self) -> list[str]:
        resyncs = leaks.not_empty(resyncs=self.service._resyncs)
        return resyncs + leaks.of_registry(
            self.service, self._redis, is_only_writer=self.is_only_writer
        )


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
