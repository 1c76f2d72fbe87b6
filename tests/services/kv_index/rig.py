"""An index on the simulated network, with workers whose caches the test changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from services.kv_index.service import KvIndexService
from shared import subjects
from shared.clock import Clock
from shared.config import KvIndexConfig
from shared.lifecycle.heartbeat import HealthMonitor, Loads
from shared.messages import (
    BlockPage,
    BlocksRemoved,
    BlocksStored,
    KvEvents,
    ListBlocks,
    MatchPrefix,
    PrefixMatches,
    Role,
    WorkerLoad,
)
from shared.packing import BLOCK_HASH_BYTES, pack_hashes
from shared.regions.region_check import RegionCheck
from shared.transport.bus import Bus, Unsubscribe
from tests.support.records import model_card
from tests.support.world.bus import SimulatedBus, SimulatedNetwork
from tests.support.world.clock import VirtualClock
from tests.support.world.randomness import SeededRandomness
from tests.support.world.store import MemoryStore

FORMAT = "fp32/b16"
PAGE_BLOCKS = 4


def block(number: int) -> bytes:
    return number.to_bytes(BLOCK_HASH_BYTES, "big")


def packed(*numbers: int) -> bytes:
    return pack_hashes([block(number) for number in numbers])


async def eventually(holds: Callable[[], bool], *, within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.001)


class CacheWorker:
    """Holds a set of blocks, publishes its changes, lists the blocks in pages of PAGE_BLOCKS. All
    are of tenants with the same region class, or without one.
    """

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        role: Role = "prefill",
        epoch: int = 1,
        region_class: str = "",
    ) -> None:
        self.bus = bus
        self.role = role
        self.region_class = region_class
        self.epoch = epoch
        self.held: dict[int, None] = {}
        self.sequence_number = 0
        self.num_listed = 0
        self._step = 0
        self._leave: Unsubscribe | None = None
        card = model_card(kv_format=FORMAT)
        randomness = SeededRandomness(epoch)
        self.health_monitor = HealthMonitor(
            bus,
            clock,
            randomness,
            roles=(role,),
            model=card,
            loads=Loads(worker=self._load),
        )
        self.health_monitor.epoch = epoch

    async def join(self) -> None:
        subject = subjects.list_blocks(self.role, self.bus.process_id)
        self._leave = await self.bus.serve(subject, ListBlocks, self.page)
        await self.health_monitor.start()
        await self.health_monitor.transition_to("ready")

    async def store(self, *numbers: int) -> None:
        self.held |= dict.fromkeys(numbers)
        await self.send_event(_run(list(numbers)))

    async def remove(self, *numbers: int) -> None:
        for number in numbers:
            self.held.pop(number, None)
        await self.send_event(BlocksRemoved(block_hashes=packed(*numbers)))

    async def send_event(self, event: BlocksStored | BlocksRemoved) -> None:
        self.sequence_number += 1
        message = KvEvents(
            worker_id=self.bus.process_id,
            epoch=self.epoch,
            sequence_number=self.sequence_number,
            model="m",
            revision="r1",
            kv_format=FORMAT,
            events=(event,),
            region_class=self.region_class,
        )
        await self.bus.publish(subjects.kv_events(self.role, self.bus.process_id), message)

    def page(self, query: ListBlocks) -> BlockPage:
        self.num_listed += 1
        numbers = sorted(self.held if query.region_class == self.region_class else ())
        first = query.cursor
        rest = [number for number in numbers if number >= first]
        shown = rest[:PAGE_BLOCKS]
        return BlockPage(
            worker_id=self.bus.process_id,
            epoch=self.epoch,
            sequence_number=self.sequence_number,
            model="m",
            revision="r1",
            kv_format=FORMAT,
            stored=(_run(shown),) if shown else (),
            next_cursor=shown[-1] + 1 if len(rest) > PAGE_BLOCKS else None,
        )

    def _load(self) -> WorkerLoad:
        self._step += 1
        load = WorkerLoad(step=self._step, step_budget_s=1.0)
        if self.region_class:
            numbers = ((self.region_class, self.sequence_number),)
            return msgspec.structs.replace(load, num_class_kv_events=numbers)
        return msgspec.structs.replace(load, num_kv_events=self.sequence_number)


def _run(numbers: list[int]) -> BlocksStored:
    return BlocksStored(
        tenant_id="t",
        parent_hash=block(0),
        first_block_index=numbers[0] - 1,
        block_hashes=packed(*numbers),
    )


class Rig:
    def __init__(self) -> None:
        self.network = SimulatedNetwork()
        self.store = MemoryStore()
        self.clock = VirtualClock()
        self.service = self.replica("kv_index-0")
        self.scheduler_bus: SimulatedBus = self.network.bus("scheduler-0")

    def replica(self, process_id: str, regions: RegionCheck | None = None) -> KvIndexService:
        config = KvIndexConfig(
            nats_url="nats://here",
            process_id=process_id,
            redis_url="redis://here",
            region="" if regions is None else regions.region,
        )
        return KvIndexService(
            config,
            self.network.bus(process_id, regions=regions),
            self.store,
            self.clock,
            SeededRandomness(7 + int(process_id[-1])),
            wall_clock=lambda: 1_000.0,
        )

    async def worker(
        self, worker_id: str, role: Role = "prefill", *, epoch: int = 1
    ) -> CacheWorker:
        worker = CacheWorker(self.network.bus(worker_id), self.clock, role, epoch)
        await worker.join()
        return worker

    async def match(self, *numbers: int) -> tuple[str, dict[str, int]]:
        return await all_matches(self.scheduler_bus, *numbers)

    async def exact(self, *numbers: int, within_s: float = 20.0) -> dict[str, int]:
        """Waits until the index reports the state exact. Returns the matches."""
        async with asyncio.timeout(within_s):
            while True:
                state, lengths = await self.match(*numbers)
                if state == "exact":
                    return lengths


async def all_matches(
    bus: Bus, *numbers: int, region_class: str = ""
) -> tuple[str, dict[str, int]]:
    query = MatchPrefix(
        tenant_id="t",
        model="m",
        revision="r1",
        block_hashes=packed(*numbers),
        region_class=region_class,
    )
    reply = await bus.request(subjects.MATCH, query, PrefixMatches, timeout_s=1.0)
    return reply.state, {match.worker_id: match.num_blocks for match in reply.matches}
