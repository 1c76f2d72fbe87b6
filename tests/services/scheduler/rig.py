"""A scheduler on the simulated network, with peers that record the messages they receive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.scheduler.service import SchedulerService
from shared import subjects
from shared.config import SchedulerConfig
from shared.lifecycle.heartbeat import HealthMonitor, Loads
from shared.messages import (
    AbortRequest,
    DecodeStarted,
    MatchPrefix,
    Placed,
    PlacementFailed,
    PrefixMatch,
    PrefixMatches,
    Queued,
    QueueKeepalive,
    Role,
    StartDecode,
    SubmitRequest,
    WorkerLoad,
)
from shared.numerics import Numerics
from shared.regions.region_check import RegionCheck
from tests.services.scheduler.literals import BLOCK_SIZE
from tests.support.records import model_card
from tests.support.world.bus import SimulatedBus, SimulatedNetwork
from tests.support.world.clock import VirtualClock
from tests.support.world.randomness import SeededRandomness

NUMERICS = Numerics("exact", "timing", "uint8", "1")
PlacementUpdate = Placed | PlacementFailed | QueueKeepalive


async def eventually(holds: Callable[[], bool], *, within_s: float = 30.0) -> None:
    """Polls in virtual time, which is exact and costs nothing."""
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.001)


@dataclass
class Worker:
    """A peer that sends heartbeats like a worker; `reply` makes its reply to StartDecode."""

    bus: SimulatedBus
    role: Role
    model: str = "m"
    num_free_blocks: int = 1000
    max_context_tokens: int = 100_000
    region: str = ""
    numerics: Numerics = NUMERICS
    features: tuple[str, ...] = ()
    reply: Callable[[StartDecode], DecodeStarted] = lambda start: DecodeStarted(
        placement_id=start.placement_id, num_cached_tokens=0
    )
    delay_s: float = 0.0
    token_s: float = 0.0  # per prompt token, by its heartbeats; 0: they report no work
    started: list[StartDecode] = field(default_factory=list)
    aborted: list[AbortRequest] = field(default_factory=list)
    started_at: list[float] = field(default_factory=list)
    step: int = 0

    async def join(self) -> None:
        worker_id = self.bus.process_id
        card = model_card(
            name=self.model,
            block_size=BLOCK_SIZE,
            max_context_tokens=self.max_context_tokens,
            numerics=self.numerics,
            features=self.features,
        )
        clock, randomness = VirtualClock(), SeededRandomness(hash_of(worker_id))
        self.health_monitor = HealthMonitor(
            self.bus,
            clock,
            randomness,
            roles=(self.role,),
            region=self.region,
            model=card,
            loads=Loads(worker=self._load),
        )
        await self.bus.serve(subjects.start_decode(worker_id), StartDecode, self._start)
        control = subjects.control("decode", worker_id)
        await self.bus.subscribe(control, AbortRequest, self.aborted.append)
        await self.health_monitor.start()
        await self.health_monitor.transition_to("ready")

    def _load(self) -> WorkerLoad:
        self.step += 1
        num_computed = self.step * 1000 if self.token_s else 0
        return WorkerLoad(
            step=self.step,
            step_budget_s=1.0,
            num_free_blocks=self.num_free_blocks,
            num_total_blocks=1000,
            num_computed_prompt_tokens=num_computed,
            busy_s=num_computed * self.token_s,
        )

    async def _start(self, message: StartDecode) -> DecodeStarted:
        self.started.append(message)
        self.started_at.append(asyncio.get_running_loop().time())
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        return self.reply(message)


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode(), "little")


class Rig:
    def __init__(self, regions: RegionCheck | None = None, **options: Any) -> None:
        self.network = SimulatedNetwork()
        config = SchedulerConfig(nats_url="nats://here", process_id="scheduler-0")
        config = msgspec.structs.replace(config, **options)
        self.service = SchedulerService(
            config,
            self.network.bus("scheduler-0", regions=regions),
            VirtualClock(),
            SeededRandomness(5),
        )
        self.updates: dict[str, list[PlacementUpdate]] = {}
        self.received_at: list[float] = []
        self.workers: dict[str, Worker] = {}
        self.matches: tuple[PrefixMatch, ...] = ()

    async def start(self) -> None:
        await self.service.start()
        await self.gateway("gateway-0")

    async def gateway(self, gateway_id: str) -> SimulatedBus:
        bus = self.network.bus(gateway_id)
        updates = self.updates.setdefault(gateway_id, [])

        def record(message: PlacementUpdate) -> None:
            updates.append(message)
            self.received_at.append(asyncio.get_running_loop().time())

        await bus.subscribe(subjects.placement(gateway_id), PlacementUpdate, record)
        self.buses = getattr(self, "buses", {}) | {gateway_id: bus}
        return bus

    async def index(self) -> None:
        def match(message: MatchPrefix) -> PrefixMatches:
            return PrefixMatches(state="exact", matches=self.matches)

        bus = self.network.bus("kv_index-0")
        await bus.serve(subjects.MATCH, MatchPrefix, match, queue=subjects.KV_INDEX_GROUP)

    async def worker(self, worker_id: str, role: Role = "decode", **options: object) -> Worker:
        worker = Worker(self.network.bus(worker_id), role, **options)  # type: ignore[arg-type]
        await worker.join()
        self.workers[worker_id] = worker
        live = self.service.health_monitor.fleet
        await eventually(lambda: any(each.process_id == worker_id for each in live.live(role)))
        return worker

    async def submit(self, message: SubmitRequest, subject: str = subjects.SUBMIT) -> Queued:
        bus = self.buses[message.request.gateway_id]
        return await bus.request(subject, message, Queued, timeout_s=0.25)

    def results(self, gateway_id: str = "gateway-0") -> list[Placed | PlacementFailed]:
        updates = self.updates[gateway_id]
        return [each for each in updates if not isinstance(each, QueueKeepalive)]

    async def result(self, *, num: int = 1, within_s: float = 30.0) -> Placed | PlacementFailed:
        await eventually(lambda: len(self.results()) >= num, within_s=within_s)
        return self.results()[num - 1]
