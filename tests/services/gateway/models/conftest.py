"""A gateway without a model of its own, whose catalogue is in a real Redis: two models with unlike
tokenizers and templates, each with a worker, and tenants that may use one of them or both.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import pytest
import pytest_asyncio

from services.gateway.models.checked_model import WALL_LIMIT_S
from services.gateway.service import GatewayService, build_gateway
from services.gateway.text.model_files import ModelFiles
from shared.clock import MonotonicClock
from shared.config import GatewayConfig
from shared.messages import ModelCard
from shared.model_registry.admin import RegistryAdmin
from shared.store import RedisStore
from shared.subjects import CredentialRole
from shared.tenancy.tenant_admin import TenantAdmin
from shared.transport.bus import NatsBus
from tests.services.gateway.peer import CARD, PeerDecode, PeerScheduler
from tests.support.servers import NatsServer, RedisServer
from tests.support.services.model_dir import write_model_dir
from tests.support.waiting import LIMIT_S, until

ENGLISH, GERMAN = "hello world, the quick brown fox", "hallo Welt, der schnelle braune Fuchs"
BRACKETS = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
USERS: tuple[tuple[CredentialRole, str], ...] = (
    ("gateway", "gateway-1"),
    ("scheduler", "scheduler-1"),
    ("host", "host-1"),
    ("client", "client-1"),
    *(("decode", f"decode-{number}") for number in range(1, 6)),
)
KEYS = {"acme": "key-of-acme", "limited": "key-of-limited", "other": "key-of-other"}


def card_of(name: str, digest: str) -> ModelCard:
    return msgspec.structs.replace(CARD, name=name, revision=digest)


@dataclass
class Fleet:
    nats: NatsServer
    gateway: GatewayService
    http: httpx.AsyncClient
    admin: RegistryAdmin
    scheduler: PeerScheduler
    dirs: dict[str, Path]
    store: RedisStore
    decodes: list[PeerDecode] = field(default_factory=list)

    async def worker(self, name: str, card: ModelCard, text: str, path: Path) -> PeerDecode:
        """Starts a worker that answers with this text."""
        bus = await NatsBus.connect(self.nats.url(name), process_id=name)
        decode = PeerDecode(bus, ModelFiles(path).tokenizer.encode([text]), card)
        await decode.start()
        self.decodes.append(decode)
        self.scheduler.workers.append(decode)
        await until(lambda: self.gateway._models.live.card_of(card.name, card.revision))
        return decode

    async def add(self, name: str, source: str, digest: str, **settings: object) -> None:
        """Adds the model's next revision, as loaded by a host."""
        model = await self.admin.add(name, source, settings=settings)
        await self.admin.record_digest(name, model.revisions[-1].name, digest)
        await self.follow()

    async def follow(self) -> None:
        """The gateway reads the catalogue, as it does each second."""
        await self.gateway._models.registry.refresh()

    async def chat(self, model: str, tenant: str = "acme", **fields: object) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}], **fields}
        return await self.post("/v1/chat/completions", body, tenant)

    async def post(self, path: str, body: object, tenant: str = "acme") -> httpx.Response:
        return await self.http.post(path, json=body, headers=self.headers(tenant))

    async def get(self, path: str, tenant: str = "acme") -> httpx.Response:
        return await self.http.get(path, headers=self.headers(tenant))

    def headers(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {KEYS[tenant]}"}


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("catalogue")
    german = write_model_dir(root / "de", corpus=[GERMAN] * 4, chat_template=BRACKETS)
    return {"en": write_model_dir(root / "en"), "de": german}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(
    tmp_path_factory: pytest.TempPathFactory, dirs: dict[str, Path]
) -> AsyncIterator[Fleet]:
    nats = NatsServer(tmp_path_factory.mktemp("nats"), USERS)
    redis = RedisServer()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(nats.stop)
        stack.callback(redis.stop)
        yield await _started(stack, nats, redis, dirs)


async def _started(
    stack: contextlib.AsyncExitStack, nats: NatsServer, redis: RedisServer, dirs: dict[str, Path]
) -> Fleet:
    store = RedisStore(redis.url, MonotonicClock(), timeout_s=LIMIT_S)
    stack.push_async_callback(store.close)
    tenants = TenantAdmin(store, lambda: 1.0)
    for tenant, limits in {"acme": {}, "limited": {"allowed_models": ("en",)}, "other": {}}.items():
        await tenants.add(tenant, limits, KEYS[tenant])
    await tenants.add_client("acme", "client-1")
    bus = await NatsBus.connect(nats.url("scheduler-1"), process_id="scheduler-1")
    scheduler = PeerScheduler(bus, [])
    config = GatewayConfig(
        nats_url=nats.url("gateway-1"),
        process_id="gateway-1",
        redis_url=redis.url,
        http_port=0,
        lame_duck_s=0.0,
        max_loaded_models=2,
    )
    gateway = await build_gateway(config)
    gateway._models.texts.max_wait_s = 2 * WALL_LIMIT_S  # a slow machine's loads end, too
    for each in (gateway, scheduler):
        await each.start()
        stack.push_async_callback(each.stop)
    http = httpx.AsyncClient(base_url=gateway.http_address, timeout=2 * WALL_LIMIT_S)
    await stack.enter_async_context(http)
    admin = RegistryAdmin(store, lambda: 1.0)
    fleet = Fleet(nats, gateway, http, admin, scheduler, dirs, store)
    assert not gateway.readiness().ready
    await fleet.add("en", str(dirs["en"]), "digest-en")
    await fleet.add("de", str(dirs["de"]), "digest-de", tenants=["acme", "limited"])
    await fleet.worker("decode-1", card_of("en", "digest-en"), ENGLISH, dirs["en"])
    await fleet.worker("decode-2", card_of("de", "digest-de"), GERMAN, dirs["de"])
    for each in fleet.decodes:
        stack.push_async_callback(each.stop)
    await until(lambda: gateway.readiness().ready)
    return fleet
