"""All services of a cluster on one event loop, each link through a relay that records it.

NATS, Redis and HTTP are plain, or all of them with TLS; KV goes over TCP, plain or sealed. Only the
mathematics is replaced: workers have the timing engine.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec

from services.gateway.service import GatewayService, build_gateway
from services.gateway.text.model_files import ModelFiles
from services.kv_index.service import KvIndexService, build_kv_index
from services.local.credentials import tls_block
from services.scheduler.service import SchedulerService, build_scheduler
from services.worker.worker import WorkerProcess, build_worker
from shared.clock import MonotonicClock
from shared.config import GatewayConfig, KvIndexConfig, SchedulerConfig, WorkerConfig
from shared.engine.executors.timing_executor import TimingExecutor
from shared.lifecycle.process import Service
from shared.messages import Role
from shared.packing import pack_token_ids
from shared.store import RedisStore
from shared.tenancy.tenant import digest_of
from shared.tenancy.tenant_admin import store_api_key
from shared.tls import TlsFiles
from shared.transport.server_config import NatsUser, nats_server_config
from tests.support.certificates import Authority, server_context
from tests.support.recording_relay import RecordingRelay, recording_relay, relay_to
from tests.support.servers import RedisServer, Server, find_binary, free_port
from tests.support.services.live_workers import accepts_work
from tests.support.waiting import LIMIT_S

Link = Literal["http", "nats", "redis", "kv"]
OTHER_HOST = "127.0.0.2"  # also this machine, but workers do not listen there
START_S = 20.0
MODEL = "tiny"
API_KEY = "key-that-only-the-gateway-may-read"
NATS_PASSWORD, REDIS_PASSWORD = "password-of-each-nats-user", "password-of-the-redis-server"
OPERATOR_TOKEN = "the token of the operator"
PROMPT = "my salary is 7,301 and my door opens with the word heliotrope, so keep it to yourself"
PREFIX = "you are the assistant of a bank whose vault opens with the word marzipan"
PROCESSES: tuple[Role, ...] = ("gateway", "scheduler", "kv_index", "prefill", "decode")


class LiveExecutor(TimingExecutor):
    revision = "r1"
    eos_token_ids = ()
    has_head = True


@dataclass
class LiveCluster:
    gateway: GatewayService
    http: httpx.AsyncClient
    executors: dict[str, TimingExecutor]
    relays: dict[Link, RecordingRelay]
    scheduler: SchedulerService
    index: KvIndexService
    prefill: WorkerProcess
    decode: WorkerProcess
    redis_url: str

    async def chat(self, content: str, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, **fields}
        return (await self.http.post("/v1/chat/completions", json=body)).raise_for_status()


@asynccontextmanager
async def live_cluster(
    folder: Path, model_dir: Path, *, has_tls: bool, security: str = "aead"
) -> AsyncIterator[LiveCluster]:
    async with AsyncExitStack() as stack:
        cluster = _Cluster(stack, folder, model_dir, Authority(folder) if has_tls else None)
        await cluster.start_servers()
        yield await cluster.start_services(security)


class _Cluster:
    def __init__(
        self, stack: AsyncExitStack, folder: Path, model_dir: Path, authority: Authority | None
    ) -> None:
        self._stack = stack
        self._folder = folder
        self._model_dir = model_dir
        self._authority = authority
        self._server = TlsFiles() if authority is None else authority.issue("server")
        self._relays: dict[Link, RecordingRelay] = {}
        self._executors: dict[str, TimingExecutor] = {}

    async def start_servers(self) -> None:
        nats_port = free_port()
        named = [(role, f"{role}-{number}") for role in PROCESSES for number in (1, 2)]
        users = [NatsUser(role, name, NATS_PASSWORD) for role, name in named]
        users.append(NatsUser("client", "client-1", NATS_PASSWORD))
        users.append(NatsUser("operator", "operator-2", NATS_PASSWORD))
        config = nats_server_config(users, host="127.0.0.1", port=nats_port)
        path = self._folder / "nats.conf"
        path.write_text(config + (tls_block(str(self._folder)) if self._authority else ""))
        nats = Server([find_binary("nats-server"), "-c", str(path)], nats_port)
        self._stack.callback(nats.stop)
        redis = RedisServer(password=REDIS_PASSWORD)
        self._stack.callback(redis.stop)
        await self._store_key(redis)
        self._nats_port = await self._relay("nats", nats_port)
        self._redis_port = await self._relay("redis", await self._tls_port(redis.port))

    async def start_services(self, security: str) -> LiveCluster:
        gateway = await build_gateway(self._gateway_config())
        scheduler = await build_scheduler(
            # the least that goes to a prefill worker, which no speed changes
            SchedulerConfig(**self._common("scheduler"), max_local_prefill_tokens=4)
        )
        index = await build_kv_index(KvIndexConfig(**self._common("kv_index"), **self._redis()))
        for service in (scheduler, index):
            await self._start(service)
        prefill, decode = [await self._worker(each, security) for each in ("prefill", "decode")]
        address = decode._worker.kv_targets[0].address
        os.unlink(address.unix_path)  # noqa: PTH108
        relay, _ = await self._stack.enter_async_context(
            recording_relay(address, listens_on=(OTHER_HOST, address.port))
        )
        self._relays["kv"] = relay
        await self._start(gateway)
        http = await self._http(gateway)
        async with asyncio.timeout(START_S):
            while not (gateway.readiness().ready and accepts_work(prefill, "decode-1", "decode")):
                await asyncio.sleep(0.01)
        relays = self._relays
        return LiveCluster(
            gateway,
            http,
            self._executors,
            relays,
            scheduler,
            index,
            prefill,
            decode,
            redis_url=self._redis()["redis_url"],
        )

    # ── links ────────────────────────────────────────────────────────────────────────────────────

    async def _relay(self, link: Link, port: int) -> int:
        relay, found = await self._stack.enter_async_context(relay_to(port))
        self._relays[link] = relay
        return found

    async def _tls_port(self, port: int) -> int:
        """Returns the port of a proxy that terminates TLS, which many builds of redis-server do not
        support.
        """
        if self._authority is None:
            return port
        proxy = relay_to(port, tls=server_context(self._server))
        _, found = await self._stack.enter_async_context(proxy)
        return found

    async def _http(self, gateway: GatewayService) -> httpx.AsyncClient:
        scheme, _, address = gateway.http_address.partition("://")
        port = await self._relay("http", int(address.rpartition(":")[2]))
        client = httpx.AsyncClient(
            base_url=f"{scheme}://localhost:{port}",
            headers={"authorization": f"Bearer {API_KEY}"},
            verify=TlsFiles(ca=self._server.ca).context(),
            timeout=START_S,
            trust_env=False,
        )
        return await self._stack.enter_async_context(client)

    # ── configurations ───────────────────────────────────────────────────────────────────────────

    def _common(self, role: Role) -> dict[str, Any]:
        """Returns the fields of every process."""
        scheme = "nats" if self._authority is None else "tls"
        url = f"{scheme}://{role}-1:{NATS_PASSWORD}@localhost:{self._nats_port}"
        return {"nats_url": url, "process_id": f"{role}-1", **self._tls_of("nats", f"{role}-1")}

    def _redis(self) -> dict[str, Any]:
        scheme = "redis" if self._authority is None else "rediss"
        url = f"{scheme}://:{REDIS_PASSWORD}@localhost:{self._redis_port}/0"
        return {"redis_url": url, **self._tls_of("redis", "redis-client")}

    def _tls_of(self, server: str, name: str) -> dict[str, str]:
        if self._authority is None:
            return {}
        files = msgspec.structs.asdict(self._authority.issue(name))
        return {f"{server}_{part}": path for part, path in files.items()}

    def _gateway_config(self) -> GatewayConfig:
        return GatewayConfig(
            **self._common("gateway"),
            **self._redis(),
            model_dir=self._model_dir,
            model_name=MODEL,
            http_port=0,
            http_cert=self._server.cert,
            http_key=self._server.key,
            cluster_secret="the secret of gateways and index",
            operator_token=OPERATOR_TOKEN,
        )

    # ── services ─────────────────────────────────────────────────────────────────────────────────

    async def _start(self, service: Service) -> None:
        self._stack.push_async_callback(service.stop)
        await service.start()

    async def _worker(self, role: Role, security: str) -> WorkerProcess:
        def load(config: WorkerConfig) -> LiveExecutor:
            executor = LiveExecutor(MonotonicClock(), num_blocks=64, vocab_size=400)
            self._executors[role] = executor
            return executor

        config = WorkerConfig(
            **self._common(role),
            model_dir=self._model_dir,
            model_name=MODEL,
            device="cpu",
            data_plane_advertised_host=OTHER_HOST,
            data_plane_security=security,
        )
        worker = await build_worker(config, (role,), load)
        assert isinstance(worker, WorkerProcess)
        await self._start(worker)
        return worker

    async def _store_key(self, redis: RedisServer) -> None:
        store = RedisStore(redis.url, MonotonicClock(), timeout_s=LIMIT_S)
        await store_api_key(store, API_KEY, "tenant-1")
        await store.close()


async def secrets_of(cluster: LiveCluster) -> dict[str, list[bytes]]:
    """Sends a chat and stores a prefix; returns the bytes that nobody on the path may read."""
    response = await cluster.chat(PROMPT)
    served = response.json()["hearth"]
    assert served["prefill_worker"] == "prefill-1"
    states = [bytes(row) for row in cluster.executors["prefill"]._kv if row.any()]
    assert len(states) == served["num_pushed_tokens"] > 64
    prefix = {"model": "tiny", "system": PREFIX}
    (await cluster.http.put("/v1/prefixes/bank", json=prefix)).raise_for_status()
    assert cluster.gateway._models.own is not None
    files = ModelFiles(Path(cluster.gateway._models.own.files.model_dir))
    token_ids = files.tokenizer.encode([PROMPT])
    return {
        "prompt": [PROMPT.encode()],
        "prompt as JSON": [b'"content":"' + PROMPT.encode()],
        "prompt as token ids": [pack_token_ids(token_ids[2:-2])],
        "named prefix": [PREFIX.encode()],
        "response": [response.content],
        "KV of the prompt": [half for each in states for half in (each[:8], each[8:])],
        "API key": [API_KEY.encode()],
        "digest of the API key": [digest_of(API_KEY).encode()],
        "NATS password": [NATS_PASSWORD.encode()],
        "Redis password": [REDIS_PASSWORD.encode()],
    }
