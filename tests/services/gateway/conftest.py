from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from services.gateway.dialects.dialect import Dialect
from services.gateway.dialects.dialect_table import DIALECTS
from services.gateway.service import GatewayService
from services.gateway.streams import stream_driver
from services.gateway.structured.grammars import request_grammars
from services.gateway.tenancy.region_rule import RegionRule
from services.gateway.text.model_files import ModelFiles
from shared import store
from shared.clock import MonotonicClock
from shared.config import GatewayConfig
from shared.store import RedisStore
from shared.tenancy.tenant_admin import TenantAdmin, store_api_key
from shared.transport.bus import NatsBus
from tests.services.gateway.peer import PeerDecode, PeerScheduler
from tests.services.gateway.shared_processes import SharedProcesses
from tests.support.servers import NatsServer, RedisServer
from tests.support.services.forked_pools import server_path
from tests.support.services.model_dir import write_model_dir
from tests.support.waiting import LIMIT_S, POLL_S, until

API_KEY = "key-of-tenant-1"
SECRET = "secret of the gateways"
ANSWER = "hello world, how are you? 😀 東京 the quick brown fox"
PROCESSES = SharedProcesses()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Of the gateway's tests alone: the scheduler of their shared cluster stays connected between
    tests, and would take requests of others. The server of forks starts here: within a job, whose
    time is limited, a busy machine takes too long for its imports.
    """
    server_path()
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def model_files(model_dir: Path) -> ModelFiles:
    return ModelFiles(model_dir)


def place_in_region(
    monkeypatch: pytest.MonkeyPatch, gateway: GatewayService, rule: RegionRule
) -> None:
    """Has a running gateway serve the tenants of another region: requests that arrive, and those
    that are open when a change of their tenant is found, up to a quarter of a second later.
    """
    for each in (gateway.api_keys, gateway.tenancy):
        monkeypatch.setattr(each, "_rule", rule)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs tests of gateways on the event loop of the shared cluster and the shared processes.
    Those that end the shared cluster come last: after each, the next one would start it again.

    Other folders have clusters, too, and pytest hands over the tests of all.
    """
    folder = Path(__file__).parent
    here = [index for index, item in enumerate(items) if item.path.is_relative_to(folder)]
    ordered = sorted((items[index] for index in here), key=_ends_the_cluster)
    for index, item in zip(here, ordered, strict=True):
        items[index] = item
        is_async = inspect.iscoroutinefunction(getattr(item, "function", None))
        if is_async and "gateway_config" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


def _ends_the_cluster(item: pytest.Item) -> bool:
    is_own = item.get_closest_marker("own_cluster") is not None
    return is_own or "no_shared_cluster" in getattr(item, "fixturenames", ())


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """Longer than a gateway's: tests that share the cores starve the processes that check grammars,
    whose niceness is theirs on purpose, and a 429 of an overloaded gateway would be right. A submit
    whose reply is late is repeated: the peers would record a request twice. After a late reply of
    Redis a gateway counts limits alone. Its own patches: what a test patches is undone before the
    cluster is reset.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_grammars, "MAX_CHECK_S", 20.0)
        patch.setattr(stream_driver, "SUBMIT_TIMEOUT_S", 5.0)
        patch.setattr(store, "MAX_STORE_TIMEOUT_S", 5.0)
        yield


@dataclass
class Beside:
    gateway: GatewayService
    http: httpx.AsyncClient


@dataclass
class Cluster:
    """A gateway, and its peers: a scheduler and two decode workers."""

    nats_server: NatsServer
    gateway: GatewayService
    scheduler: PeerScheduler
    decodes: list[PeerDecode]
    http: httpx.AsyncClient
    answer: list[int]

    @cached_property
    def files(self) -> ModelFiles:
        """Of the gateway's own model."""
        assert self.gateway._models.own is not None
        return ModelFiles(Path(self.gateway._models.own.files.model_dir))

    @contextlib.asynccontextmanager
    async def beside(self, *, poll_s: float = POLL_S, **changes: Any) -> AsyncIterator[Beside]:
        """A second gateway with the same peers, and these changes of the configuration."""
        config = msgspec.structs.replace(
            self.gateway._config,
            nats_url=self.nats_server.url("gateway-2"),
            process_id="gateway-2",
            **changes,
        )
        gateway = await PROCESSES.gateway(config)
        await gateway.start()
        try:
            await until(lambda: gateway.readiness().ready, poll_s=poll_s)
            async with http_client(gateway) as http:
                yield Beside(gateway, http)
        finally:
            await gateway.stop()

    async def reset(self) -> None:
        """Resets the peers to their defaults, and waits until the gateway has no open request."""
        self.http.cookies.clear()
        await self._start_ended()
        for decode in self.decodes:
            decode.reset(self.answer)
        self.scheduler.reset(self.decodes)
        await until(lambda: not len(self.gateway._driver) and self.is_ready)
        for each in (*self.decodes, self.scheduler):
            each.forget()

    async def _start_ended(self) -> None:
        """Starts peers again that a test has ended."""
        for index, decode in enumerate(self.decodes):
            if decode.has_ended:
                await decode.stop()
                self.decodes[index] = PeerDecode(await self.bus_of(decode.worker_id), self.answer)
                await self.decodes[index].start()
        if self.scheduler.has_ended:
            await self.scheduler.stop()
            self.scheduler = PeerScheduler(await self.bus_of("scheduler-1"), list(self.decodes))
            await self.scheduler.start()

    async def until_placed(self, count: int = 1) -> None:
        """Waits until the gateway knows the workers of so many open requests: the placement of one
        that has ended before comes for nothing.
        """
        found = self.gateway._driver._streams._by_placement
        await until(lambda: len(found) == count)

    async def bus_of(self, name: str) -> NatsBus:
        return await NatsBus.connect(self.nats_server.url(name), process_id=name)

    @property
    def is_ready(self) -> bool:
        readiness = self.gateway.readiness()
        return readiness.ready and len(readiness.workers.decode) == len(self.decodes)

    @property
    def openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(
            api_key=API_KEY, base_url=f"{self.gateway.http_address}/v1", max_retries=0
        )


def http_client(gateway: GatewayService, api_key: str = API_KEY) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {api_key}"}
    # HTTP alone: the certificates of authorities take 40 ms to load
    return httpx.AsyncClient(
        base_url=gateway.http_address, headers=headers, timeout=30, verify=False
    )


@pytest.fixture(scope="session")
def gateway_config(
    nats_server: NatsServer, redis_server: RedisServer, model_dir: Path
) -> GatewayConfig:
    PROCESSES.model_dirs.add(model_dir)
    return GatewayConfig(
        nats_url=nats_server.url("gateway-1"),
        process_id="gateway-1",
        redis_url=redis_server.url,
        model_dir=model_dir,
        http_port=0,
        max_body_bytes=64 * 1024,
        lame_duck_s=0.0,
        cluster_secret=SECRET,
    )


@dataclass
class SharedCluster:
    """One cluster for all tests of a process. It starts in 0.3 s, and a test takes 0.05 s."""

    nats_server: NatsServer
    config: GatewayConfig
    model_files: ModelFiles

    def __post_init__(self) -> None:
        self._stack = contextlib.AsyncExitStack()
        self._cluster: Cluster | None = None
        self.store = RedisStore(self.config.redis_url, MonotonicClock(), timeout_s=LIMIT_S)

    async def open(self) -> Cluster:
        """With the API key, which other tests may have deleted."""
        if self._cluster is None:
            running = running_cluster(self.nats_server, self.config, self.model_files)
            self._cluster = await self._stack.enter_async_context(running)
        self._cluster.gateway.api_keys._known.clear()
        await store_key(self.store)
        return self._cluster

    async def close(self) -> None:
        self._cluster = None
        await self._stack.aclose()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_cluster(
    nats_server: NatsServer, gateway_config: GatewayConfig, model_files: ModelFiles
) -> AsyncIterator[SharedCluster]:
    shared = SharedCluster(nats_server, gateway_config, model_files)
    yield shared
    await shared.close()
    await shared.store.close()
    await PROCESSES.close()


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(
    request: pytest.FixtureRequest, shared_cluster: SharedCluster
) -> AsyncIterator[Cluster]:
    """The shared cluster, with the peers' defaults.

    A test that stops the gateway, or counts all of its actions, is marked `own_cluster`: the test
    gets a new cluster, which no other test uses.
    """
    is_own = request.node.get_closest_marker("own_cluster") is not None
    if is_own:
        await shared_cluster.close()
    cluster = await shared_cluster.open()
    yield cluster
    if is_own:
        await shared_cluster.close()
        return
    try:
        await cluster.reset()
    except BaseException:
        await shared_cluster.close()
        raise


@pytest_asyncio.fixture(loop_scope="session")
async def no_shared_cluster(shared_cluster: SharedCluster) -> None:
    """For tests that start processes of the same names."""
    await shared_cluster.close()


async def store_key(store: RedisStore) -> None:
    """Stores the API key again: other tests empty Redis."""
    await store_api_key(store, API_KEY, "tenant-1")
    await TenantAdmin(store, lambda: 0.0).add_client("tenant-1", "client-1")


@contextlib.asynccontextmanager
async def running_cluster(
    nats_server: NatsServer,
    gateway_config: GatewayConfig,
    model_files: ModelFiles,
    dialects: Sequence[Dialect] = DIALECTS,
) -> AsyncIterator[Cluster]:
    store = RedisStore(gateway_config.redis_url, MonotonicClock(), timeout_s=LIMIT_S)
    await store_key(store)
    await store.close()
    answer = model_files.tokenizer.encode([ANSWER])
    decodes = []
    for name in ("decode-1", "decode-2"):
        bus = await NatsBus.connect(nats_server.url(name), process_id=name)
        decodes.append(PeerDecode(bus, answer))
    bus = await NatsBus.connect(nats_server.url("scheduler-1"), process_id="scheduler-1")
    scheduler = PeerScheduler(bus, list(decodes))  # tests change its list
    gateway = await PROCESSES.gateway(gateway_config, dialects)
    for each in (gateway, scheduler, *decodes):
        await each.start()
    async with http_client(gateway) as http:
        cluster = Cluster(nats_server, gateway, scheduler, decodes, http, answer)
        await until(lambda: cluster.is_ready)
        try:
            yield cluster
        finally:
            await gateway.stop()
            for each in (cluster.scheduler, *cluster.decodes):
                await each.stop()
