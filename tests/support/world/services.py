"""Schedulers and indices of a simulated fleet: the services' own code on the simulated network."""

from __future__ import annotations

from typing import Any

from services.kv_index.service import KvIndexService
from services.scheduler.service import SchedulerService
from shared.config import KvIndexConfig, SchedulerConfig
from shared.regions.region_check import RegionCheck
from shared.regions.region_classes import NO_CLASSES, RegionClasses
from tests.support.world import leaks
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.process import ProcessClock, SimulatedProcess
from tests.support.world.randomness import SeededRandomness
from tests.support.world.store import MemoryStore, ProcessStore


class SimulatedScheduler:
    def __init__(
        self,
        network: SimulatedNetwork,
        process_id: str,
        *,
        seed: int,
        max_queued_requests: int,
        region: str = "",
        classes: RegionClasses = NO_CLASSES,
        **options: Any,
    ) -> None:
        """`options` are further fields of the scheduler's configuration."""
        self.process = SimulatedProcess(process_id)
        self.bus = network.bus(process_id, self.process, RegionCheck(region, classes))
        config = SchedulerConfig(
            nats_url="nats://here",
            process_id=process_id,
            max_queued_requests=max_queued_requests,
            region=region,
            region_classes=classes.texts(),
            **options,
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
        self,
        network: SimulatedNetwork,
        store: MemoryStore,
        process_id: str,
        *,
        seed: int,
        region: str = "",
        classes: RegionClasses = NO_CLASSES,
    ) -> None:
        self.process = SimulatedProcess(process_id)
        self.bus = network.bus(process_id, self.process, RegionCheck(region, classes))
        self._redis = store
        self.is_only_writer = True  # false where a second process of its id has been
        config = KvIndexConfig(
            nats_url="nats://here",
            process_id=process_id,
            redis_url="redis://here",
            region=region,
            region_classes=classes.texts(),
        )
        clock = ProcessClock(self.process)
        self.service = KvIndexService(
            config,
            self.bus,
            ProcessStore(store, self.process),
            clock,
            SeededRandomness(seed),
            wall_clock=store.now,  # that of those who order, too
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
