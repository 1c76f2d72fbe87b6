"""A gateway without a model of its own, a scheduler, and workers of two models, whose mathematics
alone is replaced: they have the timing engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio

from services.gateway.service import GatewayService, build_gateway
from services.scheduler.service import build_scheduler
from services.worker.worker import WorkerProcess, build_worker
from shared.clock import MonotonicClock
from shared.config import GatewayConfig, SchedulerConfig, WorkerConfig
from shared.engine.executors.timing_executor import TimingExecutor
from shared.model_registry.admin import RegistryAdmin
from shared.store import RedisStore
from shared.tenancy.tenant_admin import store_api_key
from tests.support.servers import NatsServer, RedisServer
from tests.support.services.model_dir import write_model_dir
from tests.support.waiting import LIMIT_S

START_S = LIMIT_S
GERMAN = ["hallo Welt, der schnelle braune Fuchs"] * 4
MESSAGES = [{"role": "user", "content": "hello"}]


class NamedExecutor(TimingExecutor):
    eos_token_ids = ()
    has_head = True

    def __init__(self, revision: str) -> None:
        super().__init__(MonotonicClock(), num_blocks=64, vocab_size=400)
        self.revision = revision


class Cluster:
    def __init__(self, nats: NatsServer, redis: RedisServer, stack: AsyncExitStack) -> None:
        self._nats, self._redis, self._stack = nats, redis, stack
        self.http: httpx.AsyncClient

    def process(self, process_id: str) -> dict[str, Any]:
        return {"nats_url": self._nats.url(process_id), "process_id": process_id}

    async def worker(self, process_id: str, name: str, path: Path) -> None:
        """Starts a worker of both roles."""

        def load(config: WorkerConfig) -> NamedExecutor:
            return NamedExecutor(f"digest-{name}")

        config = WorkerConfig(
            **self.process(process_id), model_dir=path, model_name=name, device="cpu"
        )
        worker = await build_worker(config, ("prefill", "decode"), load)
        assert isinstance(worker, WorkerProcess)
        self._stack.push_async_callback(worker.stop)
        await worker.start()

    async def gateway(self) -> GatewayService:
        store = RedisStore(self._redis.url, MonotonicClock(), timeout_s=LIMIT_S)
        self._stack.push_async_callback(store.close)
        await store_api_key(store, "key", "acme")
        self.admin = RegistryAdmin(store, lambda: 1.0)
        scheduler = await build_scheduler(SchedulerConfig(**self.process("scheduler-1")))
        config = GatewayConfig(
            **self.process("gateway-1"), redis_url=self._redis.url, http_port=0, lame_duck_s=0.0
        )
        gateway = await build_gateway(config)
        for service in (scheduler, gateway):
            self._stack.push_async_callback(service.stop)
            await service.start()
        return gateway

    async def text(self, model: str, **fields: Any) -> str:
        body = {"model": model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0, **fields}
        response = await self.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])


@pytest_asyncio.fixture
async def two_models(
    nats_server: NatsServer, redis_server: RedisServer, tmp_path: Path
) -> AsyncIterator[Cluster]:
    paths = {
        "english": write_model_dir(tmp_path / "english"),
        "german": write_model_dir(tmp_path / "german", corpus=GERMAN),
    }
    async with AsyncExitStack() as stack:
        found = Cluster(nats_server, redis_server, stack)
        gateway = await found.gateway()
        for number, (name, path) in enumerate(paths.items(), 1):
            await found.worker(f"worker-{number}", name, path)
            await found.admin.add(name, str(path))
            await found.admin.record_digest(name, "r1", f"digest-{name}")
        found.http = await stack.enter_async_context(
            httpx.AsyncClient(
                base_url=gateway.http_address,
                headers={"authorization": "Bearer key"},
                timeout=START_S,
            )
        )
        async with asyncio.timeout(START_S):
            while len((await found.http.get("/v1/models")).json()["data"]) < 2:
                await asyncio.sleep(0.02)
        yield found


async def test_two_models_answer_at_one_address(two_models: Cluster) -> None:
    """Each in its own words, alone and beside the other."""
    names = ["english", "german"]
    alone = {name: await two_models.text(name) for name in names}
    assert alone["english"] != alone["german"]
    beside = await asyncio.gather(*(two_models.text(name) for name in names * 4))
    assert beside == [alone[name] for name in names * 4]
