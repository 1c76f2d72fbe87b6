"""The gateway process: HTTP on one side, the recovery core on the bus on the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import msgspec
import structlog

from services.gateway.app import build_app
from services.gateway.catalog import Catalog, Readiness
from services.gateway.http.server import WebServer
from services.gateway.metrics import GatewayMetrics
from services.gateway.prefixes.prefix_tokenizer import Messages, PrefixTokenizer
from services.gateway.prefixes.public_prefix_watcher import PublicPrefixWatcher
from services.gateway.prefixes.store import PrefixStore
from services.gateway.request.generation_request import GenerationRequest, scoped_affinity_key
from services.gateway.request.preparation import Preparation, PreparedRequest
from services.gateway.request.prompt import ChatPrompt
from services.gateway.request.public_prefixes import PublicPrefixes
from services.gateway.request.request_output import ClientGone, RequestOutput
from services.gateway.request.reservation import Reservation, delivered_of
from services.gateway.streams.stream_driver import StreamDriver
from services.gateway.tenancy.api_keys import ApiKeys
from services.gateway.tenancy.limits import Limits
from services.gateway.tenancy.permissions import check_model, check_regions
from services.gateway.tenancy.request_cost import LimitLease, RequestCost
from services.gateway.tenancy.usage_counter import UsageCounter
from services.gateway.text.model_files import ModelFiles
from services.gateway.text.template_renderer import Renderer
from shared.background import Background
from shared.clock import Clock, MonotonicClock
from shared.config import GatewayConfig, check
from shared.errors import NoCapacity, Overloaded
from shared.lifecycle.heartbeat import HealthMonitor
from shared.randomness import Randomness, SystemRandomness
from shared.store import RedisStore, Store
from shared.tenancy.tenant import TenantRecord
from shared.transport.bus import Bus, NatsBus

log = structlog.get_logger(__name__)

# A longer prompt is tokenized on a thread, so that running streams do not wait for it.
MAX_INLINE_CHARS = 8192
PREFIX_STORE_TIMEOUT_S = 2.0


class GatewayService:
    """A `process.Service`, and the `routes.Gateway` that the HTTP handlers talk to."""

    def __init__(
        self,
        config: GatewayConfig,
        bus: Bus,
        store: Store,
        files: ModelFiles,
        *,
        clock: Clock,
        randomness: Randomness,
        renderer: Renderer | None = None,
        prefix_redis: Store | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`prefix_redis`: a connection for what no request waits for; default: `store`."""
        self._config = config
        self._bus = bus
        self._store = store
        self._prefix_redis = store if prefix_redis is None else prefix_redis
        self.files = files
        self._clock = clock
        self._randomness = randomness
        self._health_monitor = HealthMonitor(
            bus, clock, randomness, roles=("gateway",), region=config.region
        )
        self._is_draining = False
        public = PublicPrefixes()
        self._preparation = Preparation(config, files, randomness, public)
        self._renderer = Renderer(files.chat_template) if renderer is None else renderer
        self._num_preparing = 0
        self.api_keys = ApiKeys(store, clock)
        self._limits = Limits(store, clock)
        writer_id = f"{config.process_id}-{randomness.bytes(8).hex()}"
        self._usage = UsageCounter(store, clock, writer_id=writer_id, now=wall_clock)
        self.catalog = Catalog(self._health_monitor.fleet, config.served_name)
        reader = PrefixTokenizer(self._render, files.tokenizer, lambda: bus.max_payload_bytes)
        self.prefix_store = PrefixStore(
            bus,
            self._prefix_redis,
            fleet=self._health_monitor.fleet,
            catalog=self.catalog,
            reader=reader,
            wall_clock=wall_clock,
        )
        self._public_watcher = PublicPrefixWatcher(
            public,
            self._prefix_redis,
            clock,
            catalog=self.catalog,
            reader=reader,
            wall_clock=wall_clock,
        )
        self._background = Background()
        self.metrics = GatewayMetrics()
        self._driver = StreamDriver(
            bus, clock, self._health_monitor, on_resubmitted=self.metrics.count_resubmissions
        )
        self.metrics.watch_open_streams(lambda: len(self._driver))
        self.metrics.watch_fleet(self._health_monitor.fleet.everyone)
        app = build_app(
            self,
            wall_clock=wall_clock,
            max_body_bytes=config.max_body_bytes,
            version=_installed_version(),
            metrics_token=config.metrics_token,
        )
        self._web_server = WebServer(app, config.http_host, config.http_port)

    @property
    def http_address(self) -> str:
        host, port = self._web_server.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    # ── process.Service ──────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        await self._driver.start()
        self._health_monitor.on_heartbeat(self.catalog.observe)
        await self.api_keys.warm_up()
        self._limits.start()
        self._usage.start()
        await self._health_monitor.start()
        self._background.start(self._public_watcher.run())
        await self._web_server.start()
        await self._health_monitor.transition_to("ready")
        log.info("listening", http_address=self.http_address)

    async def drain(self) -> None:
        """New requests are refused; running ones end, at their deadline at the latest."""
        self._is_draining = True
        await self._health_monitor.transition_to("draining")
        await self._driver.idle()
        await self._usage.flush()

    async def stop(self) -> None:
        self._is_draining = True
        self._driver.close_all(NoCapacity("the gateway stops", retry_after_s=1.0))
        await self._web_server.stop()
        await self._background.stop()
        await self._driver.stop()
        await self._limits.stop()
        await self._usage.stop()
        await self._health_monitor.stop()
        await self._renderer.close()
        await self._bus.close()
        await self._store.close()
        await self._prefix_redis.close()

    # ── routes.Gateway ───────────────────────────────────────────────────────────────────────────

    def new_request_id(self) -> str:
        return self._randomness.bytes(12).hex()

    def readiness(self) -> Readiness:
        return self.catalog.readiness(
            is_connected=self._bus.is_connected, is_draining=self._is_draining
        )

    async def prepare(
        self, tenant: TenantRecord, request_id: str, generation: GenerationRequest
    ) -> PreparedRequest:
        self._check_admission()
        if generation.model == self.catalog.name:
            check_model(tenant, generation.model)
        check_regions(tenant)
        self._limits.check(tenant)
        generation = await self._rendered(generation)
        prepare = partial(
            self._preparation.prepare,
            generation,
            self.catalog.card(generation.model),
            tenant=tenant,
            request_id=request_id,
            max_payload_bytes=self._bus.max_payload_bytes,
        )
        if generation.prompt.num_chars > MAX_INLINE_CHARS:
            return await self._prepare_on_thread(prepare)
        return prepare()

    async def admit(
        self, tenant: TenantRecord, request_id: str, prepared: Sequence[PreparedRequest]
    ) -> Reservation:
        request_cost = RequestCost(
            num_input_tokens=sum(len(each.prompt_token_ids) for each in prepared),
            num_output_tokens=sum(each.max_output_tokens for each in prepared),
            input_param=prepared[0].generation.prompt.param,
        )
        self._check_admission()
        self._num_preparing += len(prepared)
        try:
            lease = await self._limits.admit(tenant, request_id, request_cost)
        finally:
            self._num_preparing -= len(prepared)
        return Reservation(lease, self._close)

    def open(self, prepared: PreparedRequest, reservation: Reservation) -> RequestOutput:
        self._check_admission()
        assemblers = [self._preparation.assembler(prepared) for _ in prepared.request.choices]
        delivery = RequestOutput(
            prepared, assemblers, self.metrics, self._clock, on_end=reservation.ended
        )
        reservation.opened()
        affinity_key = scoped_affinity_key(
            prepared.request.tenant_id, prepared.generation.affinity_key
        )
        self._driver.open(prepared.request, delivery, affinity_key=affinity_key)
        return delivery

    def _close(self, lease: LimitLease, outputs: Sequence[RequestOutput]) -> None:
        """Every prompt of an answer has ended: what it took is known."""
        self._limits.settle(lease, sum(each.num_output_tokens for each in outputs))
        self._usage.count(lease.tenant.tenant_id, self.catalog.name, delivered_of(outputs))

    async def _rendered(self, generation: GenerationRequest) -> GenerationRequest:
        prompt = generation.prompt
        if not isinstance(prompt, ChatPrompt):
            return generation
        pieces = await self._render(prompt.messages, ())
        self._check_admission()
        rendered = msgspec.structs.replace(prompt, pieces=tuple(pieces))
        return msgspec.structs.replace(generation, prompt=rendered)

    async def _render(self, messages: Messages, tools: Messages) -> Sequence[str]:
        self._num_preparing += 1
        try:
            return await self._renderer.render(messages, tools)
        finally:
            self._num_preparing -= 1

    def cancel(self, request_id: str) -> None:
        error = ClientGone("the client closed the connection")
        self._driver.close(request_id, "client_gone", error)

    async def _prepare_on_thread(self, prepare: Callable[[], PreparedRequest]) -> PreparedRequest:
        self._num_preparing += 1
        try:
            return await asyncio.to_thread(prepare)
        finally:
            self._num_preparing -= 1

    def _check_admission(self) -> None:
        if self._is_draining:
            raise NoCapacity("the gateway is draining", retry_after_s=1.0)
        if len(self._driver) + self._num_preparing >= self._config.max_requests:
            raise Overloaded("too many requests are open at this gateway", retry_after_s=1.0)


async def build_gateway(config: GatewayConfig) -> GatewayService:
    """Raises ConfigError for a bad configuration or model directory, and as NatsBus.connect."""
    check(config)
    files = ModelFiles(config.model_dir)
    renderer = Renderer(files.chat_template)
    await renderer.start()
    clock = MonotonicClock()
    bus = await NatsBus.connect(config.nats_url, process_id=config.process_id)
    store = RedisStore(config.redis_url, clock)
    # texts may be long, and a slow answer to them must not close the breaker that keys depend on
    prefix_redis = RedisStore(config.redis_url, clock, timeout_s=PREFIX_STORE_TIMEOUT_S)
    return GatewayService(
        config,
        bus,
        store,
        files,
        clock=clock,
        randomness=SystemRandomness(),
        renderer=renderer,
        prefix_redis=prefix_redis,
    )


def _installed_version() -> str:
    try:
        return version("hearth")
    except PackageNotFoundError:
        return "0"
