"""The scheduler over a real nats-server with its permissions."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from services.scheduler.service import build_scheduler
from shared import subjects
from shared.config import SchedulerConfig
from shared.errors import ConfigError, NoResponders
from shared.messages import Placed, PlacementFailed, Queued, QueueKeepalive
from shared.transport.bus import NatsBus
from tests.services.scheduler.literals import submit_of
from tests.services.scheduler.rig import PlacementUpdate, Worker, eventually
from tests.support.servers import NatsServer
from tests.support.waiting import LIMIT_S


async def test_request_is_placed_over_nats(nats_server: NatsServer) -> None:
    async with AsyncExitStack() as stack:

        async def connect(process_id: str) -> NatsBus:
            bus = await NatsBus.connect(nats_server.url(process_id), process_id=process_id)
            stack.push_async_callback(bus.close)
            return bus

        config = SchedulerConfig(nats_url=nats_server.url("scheduler-1"), process_id="scheduler-1")
        scheduler = await build_scheduler(config)
        stack.push_async_callback(scheduler.stop)
        await scheduler.start()
        worker = Worker(await connect("decode-1"), "decode")  # type: ignore[arg-type]
        await worker.join()
        stack.push_async_callback(worker.health_monitor.stop)
        gateway, updates = await connect("gateway-1"), list[PlacementUpdate]()
        await gateway.subscribe(
            subjects.placement("gateway-1"),
            Placed | PlacementFailed | QueueKeepalive,
            updates.append,
        )
        await gateway.flush()
        submit = submit_of("r0", gateway_id="gateway-1", num_prompt_tokens=5000)
        queued = await gateway.request(subjects.SUBMIT, submit, Queued, timeout_s=LIMIT_S)
        assert queued.scheduler_id == "scheduler-1"
        await eventually(lambda: bool(updates), within_s=LIMIT_S)
        placed = updates[0]
        assert isinstance(placed, Placed)
        assert placed.placement_id == worker.started[0].placement_id
        await asyncio.wait_for(scheduler.drain(), timeout=LIMIT_S)
        with pytest.raises(NoResponders):
            await gateway.request(subjects.SUBMIT, submit, Queued, timeout_s=LIMIT_S)


async def test_heartbeats_with_too_many_features_are_refused(nats_server: NatsServer) -> None:
    async with AsyncExitStack() as stack:

        async def connect(process_id: str) -> NatsBus:
            bus = await NatsBus.connect(nats_server.url(process_id), process_id=process_id)
            stack.push_async_callback(bus.close)
            return bus

        async def join(process_id: str, num_features: int) -> Worker:
            features = tuple(f"demo/{number}" for number in range(num_features))
            bus: Any = await connect(process_id)
            worker = Worker(bus, "decode", features=features)
            await worker.join()
            stack.push_async_callback(worker.health_monitor.stop)
            return worker

        config = SchedulerConfig(nats_url=nats_server.url("scheduler-1"), process_id="scheduler-1")
        scheduler = await build_scheduler(config)
        stack.push_async_callback(scheduler.stop)
        await scheduler.start()
        gateway = await connect("gateway-1")
        refused, accepted = await join("decode-2", 10_000), await join("decode-1", 64)
        for number in range(4):
            submit = submit_of(f"r{number}", gateway_id="gateway-1", needs=("demo/7", "demo/63"))
            await gateway.request(subjects.SUBMIT, submit, Queued, timeout_s=LIMIT_S)
        await eventually(lambda: len(accepted.started) == 4, within_s=LIMIT_S)
        assert refused.started == []
        assert scheduler.health_monitor.fleet.heartbeat_of("decode-2") is None


async def test_configuration_error_names_every_problem() -> None:
    config = SchedulerConfig(nats_url="http://x", process_id="a b", local_prefill_tokens=-1)
    with pytest.raises(ConfigError) as raised:
        await build_scheduler(config)
    for name in ("nats_url", "process_id", "local_prefill_tokens"):
        assert name in raised.value.message
