"""Small sites on one event loop, each with its own NATS, Redis and services, linked by leaf nodes
through a relay that can cut the link. Workers have the timing engine.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from services.gateway.service import GatewayService, build_gateway
from services.kv_index.service import build_kv_index
from services.scheduler.service import SchedulerService, build_scheduler
from services.worker.worker import WorkerProcess, build_worker
from shared.clock import MonotonicClock
from shared.config import GatewayConfig, KvIndexConfig, SchedulerConfig, WorkerConfig
from shared.engine.executors.timing_executor import StepCost, TimingExecutor
from shared.lifecycle.process import Service
from shared.messages import WorkerRole
from shared.regions.region_classes import region_classes
from shared.store import RedisStore
from shared.subjects import CredentialRole
from shared.tenancy.tenant_admin import store_api_key
from shared.transport.link_config import SiteLink, SiteLinks
from shared.transport.nkeys import UserKey
from shared.transport.server_config import NatsUser, nats_server_config
from tests.support.recording_relay import RecordingRelay, relay_to
from tests.support.relay import SlowRelay
from tests.support.servers import RedisServer, Server, find_binary, free_port
from tests.support.waiting import LIMIT_S, until

MODEL, API_KEY, PASSWORD = "tiny", "key", "password"
STEP_S, REGION = 0.01, "eu"
CLASSES = region_classes(["europe=eu", "elsewhere=elsewhere"])
FAST = StepCost(base_s=STEP_S)
ROLES: tuple[CredentialRole, ...] = ("gateway", "scheduler", "worker", "kv_index", "operator")


class SiteExecutor(TimingExecutor):
    revision = "r1"


@dataclass
class LiveSite:
    name: str
    stack: AsyncExitStack
    model_dir: Path
    region: str
    nats_port: int
    redis_url: str
    relays: dict[str, RecordingRelay]  # where what its processes send and receive is recorded
    gateway: GatewayService = field(init=False)
    scheduler: SchedulerService = field(init=False)
    http: httpx.AsyncClient = field(init=False)
    workers: list[WorkerProcess] = field(default_factory=list)
    instance: str = ""  # of gateway and scheduler: two sites may have one name
    claimed: str = field(init=False)  # the name that its gateway and its scheduler have

    def common(self, role: str) -> dict[str, Any]:
        url = f"nats://{role}:{PASSWORD}@127.0.0.1:{self.nats_port}"
        classes = CLASSES.texts()
        return {
            "nats_url": url,
            "process_id": role + self.instance,
            "region": self.region,
            "region_classes": classes,
        }

    async def start(self, *, site: str) -> None:
        self.claimed = site
        self.scheduler = await build_scheduler(
            SchedulerConfig(**self.common("scheduler"), site=site)
        )
        await _start(self.stack, self.scheduler)
        await self._start_gateway()
        self.stack.push_async_callback(self._stop_gateway)

    async def restart_gateway(self) -> None:
        await self._stop_gateway()
        await self._start_gateway()

    async def _stop_gateway(self) -> None:
        await self.http.aclose()
        await self.gateway.stop()

    async def _start_gateway(self) -> None:
        self.gateway = await build_gateway(
            GatewayConfig(
                **self.common("gateway"),
                redis_url=self.redis_url,
                model_dir=self.model_dir,
                model_name=MODEL,
                http_port=0,
                cluster_secret=f"secret of {self.name}",
                lame_duck_s=0.0,
                site=self.claimed,
                kv_networks=("127.0.0.0/8",),
            )
        )
        self.http = httpx.AsyncClient(
            base_url=self.gateway.http_address,
            headers={"authorization": f"Bearer {API_KEY}"},
            timeout=60,
            trust_env=False,
        )
        await self.gateway.start()

    async def add_index(self) -> None:
        config = KvIndexConfig(**self.common("kv_index"), redis_url=self.redis_url)
        await _start(self.stack, await build_kv_index(config))

    @asynccontextmanager
    async def worker(self, **options: Any) -> AsyncIterator[WorkerProcess]:
        """Yields a worker like `add_worker`'s, which its site's scheduler knows until the end."""
        async with AsyncExitStack() as stack:
            worker = await self.add_worker(**options, stack=stack)
            stack.callback(self.workers.remove, worker)
            name = worker.report().heartbeat.process_id
            await until(lambda: self.scheduler._workers.knows(name))
            yield worker
        await until(lambda: not self.scheduler._workers.knows(name))

    async def add_worker(
        self,
        *,
        num_blocks: int,
        cost: StepCost = FAST,
        roles: tuple[WorkerRole, ...] = ("prefill", "decode"),
        stack: AsyncExitStack | None = None,
        **fields: Any,
    ) -> WorkerProcess:
        def load(config: WorkerConfig) -> TimingExecutor:
            return SiteExecutor(MonotonicClock(), num_blocks=num_blocks, vocab_size=400, cost=cost)

        config = WorkerConfig(
            **self.common("worker") | fields,
            model_dir=self.model_dir,
            model_name=MODEL,
            device="cpu",
            site=self.name,
        )
        worker = await build_worker(config, roles, load)
        assert isinstance(worker, WorkerProcess)
        await _start(stack or self.stack, worker)
        self.workers.append(worker)
        return worker

    async def chat(
        self, content: str, num_tokens: int, *, key: str = API_KEY, **fields: Any
    ) -> httpx.Response:
        body, headers = _body(content, num_tokens, **fields), {"authorization": f"Bearer {key}"}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def stream(self, content: str, num_tokens: int) -> AsyncIterator[str]:
        """Yields the text of a streamed answer, piece by piece."""
        body = _body(content, num_tokens, stream=True)
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        yield choice["delta"].get("content") or ""


async def _start(stack: AsyncExitStack, service: Service) -> None:
    stack.push_async_callback(service.stop)
    await service.start()


def _body(content: str, num_tokens: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    body = {"model": MODEL, "messages": messages, "max_tokens": num_tokens, "ignore_eos": True}
    return {**body, "temperature": 0, **fields}


@dataclass
class LinkedPair:
    """Site a, and site b, which connects to it."""

    a: LiveSite
    b: LiveSite
    relay: SlowRelay
    leaf_port: int
    recorded: RecordingRelay | None  # what crosses the link
    keys: dict[str, UserKey]  # of the links of sites b and c

    def cut(self) -> None:
        self.relay.close()

    def restore(self) -> None:
        target = ("127.0.0.1", self.leaf_port)
        self.relay = SlowRelay(lambda: target, latency_s=0.0, port=self.relay.port)

    @asynccontextmanager
    async def third_site(self, name: str = "c", *, claims: str = "") -> AsyncIterator[LiveSite]:
        """Yields a site that connects to site a, too; its processes may claim another name."""
        folder = self.a.model_dir.parent
        async with AsyncExitStack() as stack:
            address = f"127.0.0.1:{self.leaf_port}"
            link = SiteLink(peer="a", region=REGION, address=address, seed=self.keys[name].seed)
            links = SiteLinks(site=name, links=(link,), port=free_port())
            site = await _site(stack, folder, self.a.model_dir, links, REGION)
            site.instance = ".second"
            await site.start(site=claims or name)
            yield site


@asynccontextmanager
async def linked_pair(
    folder: Path,
    model_dir: Path,
    *,
    regions: tuple[str, str] = (REGION, REGION),
    is_recorded: bool = False,
) -> AsyncIterator[LinkedPair]:
    """`regions` are those of sites a and b. If it is recorded, NATS, Redis and the link are reached
    through relays that record all bytes.
    """
    async with AsyncExitStack() as stack:
        keys, leaf_port = {name: UserKey.create() for name in "bc"}, free_port()
        recorded, target_port = None, leaf_port
        if is_recorded:
            recorded, target_port = await stack.enter_async_context(relay_to(leaf_port))
        relay = SlowRelay(lambda: ("127.0.0.1", target_port), latency_s=0.0)
        accepts = tuple(
            SiteLink(peer=name, region=regions[1], key=each.public) for name, each in keys.items()
        )
        address = f"127.0.0.1:{relay.port}"
        opens = SiteLink(peer="a", region=regions[0], address=address, seed=keys["b"].seed)
        links = (
            SiteLinks(site="a", links=accepts, port=leaf_port),
            SiteLinks(site="b", links=(opens,), port=free_port()),
        )
        sites = [
            await _site(stack, folder, model_dir, each, region, is_recorded=is_recorded)
            for each, region in zip(links, regions, strict=True)
        ]
        pair = LinkedPair(*sites, relay, leaf_port, recorded, keys)
        stack.callback(lambda: pair.relay.close())
        yield pair


async def _site(
    stack: AsyncExitStack,
    folder: Path,
    model_dir: Path,
    links: SiteLinks,
    region: str,
    *,
    is_recorded: bool = False,
) -> LiveSite:
    port = free_port()
    users = [NatsUser(role, role, PASSWORD, region) for role in ROLES]
    path = folder / f"nats-{links.site}-{port}.conf"
    text = nats_server_config(users, host="127.0.0.1", port=port, links=links, classes=CLASSES)
    path.write_text(text)
    nats = Server([find_binary("nats-server"), "-c", str(path)], port)
    stack.callback(nats.stop)
    redis = RedisServer()
    stack.callback(redis.stop)
    store = RedisStore(redis.url, MonotonicClock(), timeout_s=LIMIT_S)
    await store_api_key(store, API_KEY, "tenant-1")
    await store.close()
    ports, relays = {"nats": port, "redis": redis.port}, dict[str, RecordingRelay]()
    if is_recorded:
        for name, each in ports.items():
            relays[name], ports[name] = await stack.enter_async_context(relay_to(each))
    redis_url = f"redis://127.0.0.1:{ports['redis']}/0"
    return LiveSite(links.site, stack, model_dir, region, ports["nats"], redis_url, relays)
