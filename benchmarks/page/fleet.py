"""A fleet of which one process sends all heartbeats, each over a connection of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from shared.lifecycle.health import HEARTBEAT_INTERVAL_S
from shared.messages import Heartbeat, ModelCard, SchedulerLoad, WorkerLoad
from shared.subjects import heartbeat
from shared.transport.bus import NatsBus
from tests.support.records import model_card
from tests.support.servers import NatsServer

SCHEDULER = "scheduler-1"
REGIONS = ("eu-west", "eu-north", "us-east", "ap-south")
CARD = model_card(name="hearth-demo", revision="r", kv_format="k", vocab_size=4096)


def region_of(index: int) -> str:
    return REGIONS[index % len(REGIONS)]


def scheduler_heartbeat(number: int) -> Heartbeat:
    """Returns a scheduler's heartbeat: it makes the gateway ready, which then stops polling."""
    return Heartbeat(
        process_id=SCHEDULER,
        epoch=1,
        sequence_number=number,
        roles=("scheduler",),
        state="ready",
        interval_s=HEARTBEAT_INTERVAL_S,
        scheduler=SchedulerLoad(),
    )


@dataclass
class Worker:
    """Heartbeats of a decode worker under load."""

    bus: NatsBus
    region: str
    card: ModelCard = CARD
    number: int = 0

    async def beat(self) -> None:
        self.number += 1
        load = WorkerLoad(
            step=self.number,
            step_budget_s=1.0,
            num_running=self.number % 32,
            num_waiting=self.number % 5,
            num_free_blocks=1000 - self.number % 900,
            num_total_blocks=1000,
            num_generated_tokens=self.number * (300 + self.number % 90),
            num_prompt_tokens=self.number * 100,
            num_cached_prompt_tokens=self.number * (40 + self.number % 7),
        )
        message = Heartbeat(
            process_id=self.bus.process_id,
            epoch=1,
            sequence_number=self.number,
            roles=("decode",),
            state="ready",
            interval_s=HEARTBEAT_INTERVAL_S,
            region=self.region,
            load=load,
            model=self.card,
        )
        await self.bus.publish(heartbeat(("decode",), self.bus.process_id, self.region), message)


class Workers:
    """A fleet that sends heartbeats until it is stopped, in a thread's event loop of its own."""

    def __init__(
        self, server: NatsServer, num: int, *, model: str = CARD.name, has_scheduler: bool = True
    ) -> None:
        self._server = server
        self._num = num
        self._card = msgspec.structs.replace(CARD, name=model)
        self._has_scheduler = has_scheduler
        self.silent: set[str] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        workers = [await self._connect(index) for index in range(1, self._num + 1)]
        scheduler = None
        if self._has_scheduler:
            scheduler = await NatsBus.connect(self._server.url(SCHEDULER), process_id=SCHEDULER)
        beating = asyncio.create_task(self._beat(workers, scheduler))
        try:
            yield
        finally:
            beating.cancel()
            buses = [each.bus for each in workers] + ([scheduler] if scheduler else [])
            await asyncio.gather(*(each.close() for each in buses))

    async def _connect(self, index: int) -> Worker:
        name = f"decode-{index}"
        bus = await NatsBus.connect(self._server.url(name), process_id=name)
        return Worker(bus, region_of(index), self._card)

    async def _beat(self, workers: list[Worker], scheduler: NatsBus | None) -> None:
        """Spread over the interval, as those of separate processes are."""
        for number in itertools.count(1):
            started = time.monotonic()
            if scheduler is not None:
                subject = heartbeat(("scheduler",), SCHEDULER)
                await scheduler.publish(subject, scheduler_heartbeat(number))
            for index, each in enumerate(workers):
                due = started + HEARTBEAT_INTERVAL_S * index / len(workers)
                if (left := due - time.monotonic()) > 0.002:
                    await asyncio.sleep(left)
                if each.bus.process_id not in self.silent:
                    await each.beat()
            await asyncio.sleep(max(0.0, started + HEARTBEAT_INTERVAL_S - time.monotonic()))
