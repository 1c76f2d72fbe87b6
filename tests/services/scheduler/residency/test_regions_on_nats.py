"""Data residency against workers that claim a region which their credential does not have."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from services.scheduler.service import build_scheduler
from shared import subjects
from shared.config import SchedulerConfig
from shared.messages import Queued, Role
from shared.transport.bus import NatsBus
from shared.transport.server_config import NatsUser
from tests.services.scheduler.literals import submit_of
from tests.services.scheduler.rig import Worker, eventually
from tests.support.servers import PASSWORD, USERS, NatsServer
from tests.support.waiting import LIMIT_S

REGIONS = {
    **dict.fromkeys(("decode-1", "prefill-1", "scheduler-1"), "eu"),
    **dict.fromkeys(("decode-2", "prefill-2"), "us"),
}
NUM_REQUESTS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    users = [NatsUser(role, name, PASSWORD, REGIONS.get(name, "")) for role, name in USERS]
    started = NatsServer(tmp_path_factory.mktemp("nats"), users)
    yield started
    started.stop()


class LyingBus:
    """Heartbeats claim `eu` on the subject that the server allows, the one of `us`."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def publish(self, subject: str, message: Any) -> None:
        await self._bus.publish(subject.replace(".heartbeat.eu", ".heartbeat.us"), message)


@asynccontextmanager
async def connected(server: NatsServer, process_id: str) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(server.url(process_id), process_id=process_id)
    try:
        yield bus
    finally:
        await bus.close()


@pytest.mark.parametrize("lie", ["on the subject of eu", "in the message"])
async def test_worker_of_another_region_gets_no_prompt_bound_to_a_region(
    server: NatsServer, lie: str
) -> None:
    """It claims `eu`, idle and with more room than the worker that is there."""
    async with AsyncExitStack() as stack:

        async def join(process_id: str, role: Role, **options: Any) -> Worker:
            bus: Any = await stack.enter_async_context(connected(server, process_id))
            is_other = REGIONS[process_id] == "us"
            bus = LyingBus(bus) if is_other and lie == "in the message" else bus
            worker = Worker(bus, role, region="eu", **options)
            await worker.join()
            stack.push_async_callback(worker.health_monitor.stop)
            return worker

        config = SchedulerConfig(
            nats_url=server.url("scheduler-1"), process_id="scheduler-1", region="eu"
        )
        scheduler = await build_scheduler(config)
        stack.push_async_callback(scheduler.stop)
        await scheduler.start()
        gateway = await stack.enter_async_context(connected(server, "gateway-1"))
        claims = await join("decode-2", "decode"), await join("prefill-2", "prefill")
        owns = await join("decode-1", "decode", num_free_blocks=500)
        await join("prefill-1", "prefill")
        for number in range(NUM_REQUESTS):
            submit = submit_of(
                f"r{number}",
                gateway_id="gateway-1",
                num_prompt_tokens=1000,
                allowed_regions=("eu",),
            )
            await gateway.request(subjects.SUBMIT, submit, Queued, timeout_s=LIMIT_S)
        await eventually(lambda: len(owns.started) == NUM_REQUESTS, within_s=LIMIT_S)
        assert all(not each.started for each in claims)
        candidates = {each for start in owns.started for each in start.prefill_candidates}
        assert "prefill-2" not in candidates
