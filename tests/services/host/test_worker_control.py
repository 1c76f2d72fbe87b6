"""Commands to workers over a real nats-server: replies that are lost, workers that are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.host.budget import ModelKey
from services.host.hosted_revisions import HostedRevision
from services.host.workers.worker_control import WorkerControl
from shared.errors import HearthError
from shared.messages import Done, ParkWorker, WakeWorker
from shared.model_registry.record import RegisteredModel, RegisteredRevision
from shared.subjects import lifecycle
from shared.transport.bus import NatsBus
from tests.support.servers import NatsServer
from tests.support.services.live_host import USERS

TRY_S = 0.05
WORKER = "worker-1.m-1"


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path, USERS)
    yield server
    server.stop()


def hosted_model() -> HostedRevision:
    revision = RegisteredRevision(name="r1", source="m")
    model = RegisteredModel(name="m", revisions=(revision,))
    return HostedRevision(ModelKey("m", "r1"), model, revision, worker_id=WORKER)


class SilentOnce:
    """A worker that carries out every command; its first reply is lost."""

    def __init__(self) -> None:
        self.commands: list[ParkWorker | WakeWorker] = []
        self.received = asyncio.Event()

    async def on_command(self, command: ParkWorker | WakeWorker) -> Done:
        self.commands.append(command)
        self.received.set()
        if len(self.commands) == 1:
            await asyncio.Event().wait()
        return Done()


@asynccontextmanager
async def served(nats: NatsServer, worker: SilentOnce) -> AsyncIterator[WorkerControl]:
    bus = await NatsBus.connect(nats.url("worker-1"), process_id=WORKER)
    host = await NatsBus.connect(nats.url("host-1"), process_id="host-1")
    try:
        await bus.serve(lifecycle("decode", WORKER), ParkWorker | WakeWorker, worker.on_command)
        await bus.flush()
        yield WorkerControl(host, try_s=TRY_S)
    finally:
        await host.close()
        await bus.close()


async def test_command_whose_reply_is_lost_is_sent_again(nats: NatsServer) -> None:
    worker = SilentOnce()
    async with served(nats, worker) as control:
        await control.wake(hosted_model(), 16)
    assert worker.commands == [WakeWorker(kv_bytes=16)] * 2


async def test_command_does_not_reach_the_next_worker(nats: NatsServer) -> None:
    worker, hosted = SilentOnce(), hosted_model()
    async with served(nats, worker) as control:
        waking = asyncio.create_task(control.wake(hosted, 16))
        await worker.received.wait()
        hosted.worker_id = "worker-1.m-2"
        with pytest.raises(HearthError, match=r"worker of model m \(r1\) has ended"):
            await waking
    assert len(worker.commands) == 1
