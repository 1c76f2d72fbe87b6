"""The gateway process: HTTP on one side, the bus on the other, the recovery core between them.

The only file of this service that awaits the bus. What arrives is handed to `Streams`, whose
actions are carried out here; its decisions are all in there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import structlog

from services.gateway.actions import Publish, Resend, Submit, submit_subject
from services.gateway.catalog import Catalog, Readiness
from services.gateway.delivery import ClientGone, Delivery
from services.gateway.generation import Generation
from services.gateway.metrics import GatewayMetrics
from services.gateway.preparation import Preparation, Prepared
from services.gateway.routes import build_app
from services.gateway.streams import Streams
from services.gateway.tenants import Tenants
from services.gateway.text.model_files import ModelFiles
from services.gateway.web_server import WebServer
from shared.background import Background
from shared.bus import Bus, NatsBus
from shared.clock import Clock, MonotonicClock
from shared.config import GatewayConfig, check
from shared.errors import HearthError, NoCapacity, Overloaded
from shared.health import TICK_S, Loss
from shared.heartbeat import Heart
from shared.messages import (
    Placed,
    PlacementFailed,
    Queued,
    QueueKeepalive,
    TokenBatch,
)
from shared.outbox import Outbox
from shared.randomness import Randomness, SystemRandomness
from shared.store import RedisStore, Store
from shared.subjects import placement, resend, tokens

log = structlog.get_logger(__name__)

SUBMIT_TIMEOUT_S = 0.25
RESEND_TIMEOUT_S = 0.5
# A longer prompt is tokenized on a thread, so that running streams do not wait for it.
MAX_INLINE_CHARS = 8192


class GatewayBus(Bus, Protocol):
    @property
    def is_connected(self) -> bool: ...


class GatewayService:
    """A `process.Service`, and the `routes.Gateway` that the HTTP handlers talk to."""

    def __init__(
        self,
        config: GatewayConfig,
        bus: GatewayBus,
        store: Store,
        files: ModelFiles,
        *,
        clock: Clock,
        randomness: Randomness,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._bus = bus
        self._store = store
        self.files = files
        self._clock = clock
        self._randomness = randomness
        self._streams = Streams()
        self._heart = Heart(bus, clock, randomness, roles=("gateway",), region=config.region)
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._preparation = Preparation(config, files, randomness)
        self._outbox = Outbox(bus)
        self._background = Background()
        self._num_counted_resubmissions = 0
        self._num_preparing = 0
        self.tenants = Tenants(store, clock)
        self.catalog = Catalog(self._heart.fleet, config.served_name)
        self.metrics = GatewayMetrics()
        self.metrics.watch_open_streams(lambda: len(self._streams))
        app = build_app(
            self,
            wall_clock=wall_clock,
            max_body_bytes=config.max_body_bytes,
            version=_installed_version(),
        )
        self._web_server = WebServer(app, config.http_host, config.http_port)

    @property
    def http_address(self) -> str:
        host, port = self._web_server.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    # ── process.Service ──────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        own = self._bus.process_id
        await self._bus.subscribe(tokens(own), TokenBatch, self._on_token_batch)
        messages = Placed | PlacementFailed | QueueKeepalive
        await self._bus.subscribe(placement(own), messages, self._on_placement)
        self._heart.on_lost(self._on_lost)
        self._heart.on_heard(self.catalog.observe)
        self._outbox.start()
        self._background.start(self._tick())
        await self.tenants.warm_up()
        await self._heart.start()
        await self._web_server.start()
        await self._heart.become("ready")
        log.info("listening", http_address=self.http_address)

    async def drain(self) -> None:
        """New requests are refused; running ones end, at their deadline at the latest."""
        self._is_draining = True
        await self._heart.become("draining")
        while len(self._streams):
            self._is_idle.clear()
            await self._is_idle.wait()

    async def stop(self) -> None:
        self._is_draining = True
        now = self._clock.now()
        for request_id in self._streams.request_ids():
            error = NoCapacity("the gateway stops", retry_after_s=1.0)
            self._streams.close(request_id, "failed", error, now)
        self._perform()
        await self._web_server.stop()
        await self._background.stop()
        await self._outbox.stop()
        await self._heart.stop()
        await self._bus.close()
        await self._store.close()

    # ── routes.Gateway ───────────────────────────────────────────────────────────────────────────

    def new_request_id(self) -> str:
        return self._randomness.bytes(12).hex()

    def readiness(self) -> Readiness:
        return self.catalog.readiness(
            is_connected=self._bus.is_connected, is_draining=self._is_draining
        )

    async def open(self, tenant_id: str, request_id: str, generation: Generation) -> Delivery:
        self._check_admission()
        prepare = partial(
            self._preparation.prepare,
            generation,
            self.catalog.card(generation.model),
            tenant_id=tenant_id,
            request_id=request_id,
            max_payload_bytes=self._bus.max_payload_bytes,
        )
        if generation.prompt.num_chars > MAX_INLINE_CHARS:
            prepared = await self._prepare_on_thread(prepare)
        else:
            prepared = prepare()
        assemblers = [self._preparation.assembler(prepared) for _ in prepared.request.choices]
        delivery = Delivery(prepared, assemblers, self.metrics, self._clock)
        self._streams.open(prepared.request, delivery, self._clock.now())
        self._perform()
        return delivery

    def leave(self, request_id: str) -> None:
        error = ClientGone("the client closed the connection")
        self._streams.close(request_id, "client_gone", error, self._clock.now())
        self._perform()

    async def _prepare_on_thread(self, prepare: Callable[[], Prepared]) -> Prepared:
        self._num_preparing += 1
        try:
            prepared = await asyncio.to_thread(prepare)
        finally:
            self._num_preparing -= 1
        self._check_admission()
        return prepared

    def _check_admission(self) -> None:
        if self._is_draining:
            raise NoCapacity("the gateway is draining", retry_after_s=1.0)
        if len(self._streams) + self._num_preparing >= self._config.max_requests:
            raise Overloaded("too many requests are open at this gateway", retry_after_s=1.0)

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def _on_token_batch(self, batch: TokenBatch) -> None:
        self._streams.on_token_batch(batch, self._clock.now())
        self._perform()

    def _on_placement(self, message: Placed | PlacementFailed | QueueKeepalive) -> None:
        now = self._clock.now()
        match message:
            case Placed():
                self._streams.on_placed(message, now)
            case PlacementFailed():
                self._streams.on_placement_failed(message, now)
            case QueueKeepalive():
                self._streams.on_keepalive(message, now)
        self._perform()

    def _on_lost(self, process_id: str, loss: Loss) -> None:
        now = self._clock.now()
        is_excluded = loss in (Loss.SILENT, Loss.STUCK, Loss.GONE)
        self._streams.on_worker_lost(process_id, now, is_excluded=is_excluded)
        self._streams.on_scheduler_lost(process_id, now)
        self._perform()

    async def _tick(self) -> None:
        fleet, was_connected = self._heart.fleet, True
        while True:
            await self._clock.sleep(TICK_S)
            now, is_connected = self._clock.now(), self._bus.is_connected
            if is_connected and not was_connected:
                self._streams.on_bus_back(now)
            was_connected = is_connected
            for worker_id in self._streams.quiet_workers(now):
                # the placement may have come just after the loss was announced
                if fleet.heartbeat_of(worker_id) is not None and not fleet.is_live(worker_id):
                    self._streams.on_worker_lost(worker_id, now, is_excluded=True)
            self._streams.tick(now, is_bus_trusted=fleet.can_judge(now))
            self._perform()

    # ── actions ──────────────────────────────────────────────────────────────────────────────────

    def _perform(self) -> None:
        for action in self._streams.take_actions():
            match action:
                case Publish():
                    self._outbox.post(action.subject, action.message)
                case Submit():
                    self._background.start(self._submit(action))
                case Resend():
                    self._background.start(self._resend(action))
        if not len(self._streams):
            self._is_idle.set()
        fresh = self._streams.num_resubmissions - self._num_counted_resubmissions
        if fresh:
            self._num_counted_resubmissions += fresh
            self.metrics.count_resubmissions(fresh)

    async def _submit(self, action: Submit) -> None:
        message = action.message
        request_id, attempt = message.request.request_id, message.attempt
        live = sorted(each.process_id for each in self._heart.fleet.live("scheduler"))
        subject = submit_subject(message, live)
        try:
            reply = await self._bus.request(subject, message, Queued, timeout_s=SUBMIT_TIMEOUT_S)
        except HearthError as error:
            self._streams.on_refused(request_id, attempt, error, self._clock.now())
        else:
            self._streams.on_queued(request_id, attempt, reply, self._clock.now())
        self._perform()

    async def _resend(self, action: Resend) -> None:
        subject = resend(action.worker_id)
        try:
            batch = await self._bus.request(
                subject, action.message, TokenBatch, timeout_s=RESEND_TIMEOUT_S
            )
        except HearthError as error:
            now = self._clock.now()
            is_trusted = self._heart.fleet.can_judge(now)
            self._streams.on_resend_failed(action.message, error, now, is_bus_trusted=is_trusted)
        else:
            self._streams.on_resent(action.message, batch, self._clock.now())
        self._perform()


async def build_gateway(config: GatewayConfig) -> GatewayService:
    """Raises ConfigError for a bad configuration or model directory, and as NatsBus.connect."""
    check(config)
    files = ModelFiles(config.model_dir)
    clock = MonotonicClock()
    bus = await NatsBus.connect(config.nats_url, process_id=config.process_id)
    store = RedisStore(config.redis_url, clock)
    return GatewayService(
        config,
        bus,
        store,
        files,
        clock=clock,
        randomness=SystemRandomness(),
    )


def _installed_version() -> str:
    try:
        return version("hearth")
    except PackageNotFoundError:
        return "0"
