from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from services.gateway.service import GatewayService, build_gateway
from services.gateway.text.model_files import ModelFiles
from shared.clock import MonotonicClock
from shared.config import GatewayConfig
from shared.store import RedisStore
from shared.tenancy.tenant_admin import store_api_key
from shared.transport.bus import NatsBus
from tests.servers import NatsServer, RedisServer
from tests.services.gateway.model_dir import write_model_dir
from tests.services.gateway.peer import PeerDecode, PeerScheduler

API_KEY = "key-of-tenant-1"
ANSWER = "hello world, how are you? 😀 東京 the quick brown fox"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def model_files(model_dir: Path) -> ModelFiles:
    return ModelFiles(model_dir)


@dataclass
class Cluster:
    """A gateway with a scheduler and two decode workers as its peers."""

    gateway: GatewayService
    scheduler: PeerScheduler
    decodes: list[PeerDecode]
    http: httpx.AsyncClient

    @property
    def openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(
            api_key=API_KEY, base_url=f"{self.gateway.http_address}/v1", max_retries=0
        )


async def until(condition: object, timeout_s: float = 5.0) -> None:
    """Waits until a plain predicate holds; for states that announce themselves to nobody."""
    assert callable(condition)
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def gateway_config(
    nats_server: NatsServer, redis_server: RedisServer, model_dir: Path
) -> GatewayConfig:
    return GatewayConfig(
        nats_url=nats_server.url("gateway-1"),
        process_id="gateway-1",
        redis_url=redis_server.url,
        model_dir=model_dir,
        http_port=0,
        max_body_bytes=64 * 1024,
    )


@pytest.fixture
async def cluster(
    nats_server: NatsServer, gateway_config: GatewayConfig, model_files: ModelFiles
) -> AsyncIterator[Cluster]:
    async with running_cluster(nats_server, gateway_config, model_files) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def running_cluster(
    nats_server: NatsServer, gateway_config: GatewayConfig, model_files: ModelFiles
) -> AsyncIterator[Cluster]:
    store = RedisStore(gateway_config.redis_url, MonotonicClock(), timeout_s=2.0)
    await store_api_key(store, API_KEY, "tenant-1")
    await store.close()
    answer = model_files.tokenizer.encode([ANSWER])
    decodes = []
    for name in ("decode-1", "decode-2"):
        bus = await NatsBus.connect(nats_server.url(name), process_id=name)
        decodes.append(PeerDecode(bus, answer))
    bus = await NatsBus.connect(nats_server.url("scheduler-1"), process_id="scheduler-1")
    scheduler = PeerScheduler(bus, decodes)
    gateway = await build_gateway(gateway_config)
    for each in (gateway, scheduler, *decodes):
        await each.start()
    headers = {"authorization": f"Bearer {API_KEY}"}
    async with httpx.AsyncClient(
        base_url=gateway.http_address, headers=headers, timeout=30
    ) as http:
        cluster = Cluster(gateway, scheduler, decodes, http)
        await until(lambda: len(_ids(gateway, "decode")) == 2 and _ids(gateway, "scheduler"))
        yield cluster
    await gateway.stop()
    for each in (scheduler, *decodes):
        await each.stop()


def _ids(gateway: GatewayService, role: str) -> list[str]:
    readiness = gateway.readiness()
    return readiness.workers.decode if role == "decode" else readiness.scheduler
