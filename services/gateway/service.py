"""The gateway process: HTTP on one side, the recovery core on the bus on the other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import structlog
from litestar.types import ASGIApp

from services.gateway.app import build_app
from services.gateway.dialects.admission import authorization_of
from services.gateway.dialects.dialect_state import DialectState
from services.gateway.dialects.dialect_table import answers
from services.gateway.http.body_budget import BodyBudget
from services.gateway.http.certificate import Certificate
from services.gateway.http.server import WebServer
from services.gateway.models.gateway_models import GatewayModels
from services.gateway.models.live_models import Readiness
from services.gateway.models.model_check import CheckedModel
from services.gateway.nats_api.api import NatsApi
from services.gateway.observability.metrics.gateway_metrics import GatewayMetrics
from services.gateway.observability.telemetry.telemetry import RequestTelemetry
from services.gateway.observability.telemetry.tracing import open_tracing
from services.gateway.operator.cluster.routes import ClusterRoutes
from services.gateway.operator.server_info import ServerInfo
from services.gateway.preparation.preparation_pool import PreparationPool
from services.gateway.processes import grammar_pool, preparation_loads, preparation_pool
from services.gateway.request.preparation_slots import RequestCapacity
from services.gateway.request.preparer import Preparer
from services.gateway.request.public_prefixes import PublicPrefixes
from services.gateway.request.submission import Submission
from services.gateway.request.unsent_output import UnsentOutput
from services.gateway.streams.actions import (
    Report,
    ReportNumericsChange,
    ReportResubmission,
    ReportUnlikePrefill,
)
from services.gateway.streams.stream_driver import StreamDriver
from services.gateway.tenancy.tenancy import Tenancy
from shared.background import Background
from shared.block_hash import root_key
from shared.clock import Clock
from shared.config import GatewayConfig
from shared.errors import NoCapacity
from shared.lifecycle.heartbeat import HealthMonitor
from shared.lifecycle.release import installed_release
from shared.messages import ReadTimeline, TimelineRead
from shared.metrics.families.member import Member
from shared.metrics.process_report import ProcessReport
from shared.randomness import Randomness
from shared.store import Store, StoreUnavailable
from shared.subjects import trace
from shared.transport.bus import Bus, NatsBus

log = structlog.get_logger(__name__)


class GatewayService:
    """A `process.Service` that composes the gateway's parts."""

    def __init__(
        self,
        config: GatewayConfig,
        bus: Bus,
        store: Store,
        own: CheckedModel | None,
        *,
        clock: Clock,
        randomness: Randomness,
        pool: PreparationPool | None = None,
        check_pool: PreparationPool | None = None,
        prefix_redis: Store | None = None,
        bulk_redis: Store | None = None,
        redis_replica: Store | None = None,
        clients: NatsBus | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`own`: the gateway's own model; None: it has none. `prefix_redis`: a Redis connection
        outside the request path (default: `store`); `bulk_redis`: one for replies of megabytes
        (default: `prefix_redis`); `redis_replica`: a near one, for API keys; `clients`: the
        connection of the API over NATS (default: there is none).
        """
        self._config = config
        self._bus = bus
        self._store = store
        self._prefix_redis = store if prefix_redis is None else prefix_redis
        self._bulk_redis = self._prefix_redis if bulk_redis is None else bulk_redis
        self._redis_replica = redis_replica
        self._clock = clock
        self._randomness = randomness
        self.metrics = GatewayMetrics(config.process_id)
        self._health_monitor = HealthMonitor(
            bus,
            clock,
            randomness,
            roles=("gateway",),
            reads_models=True,
            region=config.region,
            gateway=self.metrics.load,
            store=store.load,
        )
        fleet = self._health_monitor.fleet
        self._cluster_routes = ClusterRoutes.of(
            fleet, self._prefix_redis, clock, wall_clock, config.operator_token
        )
        self._cluster = self._cluster_routes.feed
        public = PublicPrefixes(root_key(config.cluster_secret))
        self._pool = preparation_pool(config, own) if pool is None else pool
        check_pool = grammar_pool(config, own) if check_pool is None else check_pool
        tenancy = Tenancy(
            config,
            store,
            self._prefix_redis,
            clock,
            wall_clock,
            replica=redis_replica,
            num_gateways=self._num_gateways,
            writer_id=f"{config.process_id}-{randomness.bytes(8).hex()}",
        )
        self.api_keys, self._limits, self._usage = tenancy.api_keys, tenancy.limits, tenancy.usage
        self._redis_memory = tenancy.redis_memory
        self._models = GatewayModels(
            config,
            own,
            fleet,
            store,
            self._prefix_redis,
            pool=self._pool,
            check_pool=check_pool,
            clock=clock,
            randomness=randomness,
        )
        self.catalog, self.models, self.model_names = (
            self._models.live,
            self._models.served,
            self._models.names,
        )
        self.metrics.watch_preparation(
            lambda: preparation_loads(
                requests=self._pool, prompts=self._models.encoding, grammars=check_pool
            )
        )
        self._models.registry.on_change(lambda: self.metrics.retain_models(self.models.names))
        self.metrics.watch_loaded_models(lambda: len(self._models.texts) + (own is not None))
        self._driver = StreamDriver(
            bus,
            clock,
            self._health_monitor,
            on_report=self._count,
            num_free=lambda: self.capacity.num_free,
        )
        tracing = open_tracing(os.environ, config.process_id, randomness.bytes, clock)
        self.telemetry = RequestTelemetry(
            config.process_id,
            clock,
            wall_clock,
            tracing,
            observe=self.metrics.observe_timeline,
            region_of=self._region_of,
        )
        if tracing is not None:
            self.metrics.watch_dropped_spans(lambda: self.telemetry.num_dropped_spans)
        self.metrics.watch_redis(lambda: self._redis_memory.use)
        self.capacity = RequestCapacity(config.max_requests, lambda: len(self._driver))
        self.preparer = Preparer.of(
            config,
            self._pool,
            self.capacity,
            clock,
            randomness,
            public,
            max_payload_bytes=lambda: self._bus.max_payload_bytes,
        )
        self.stored = DialectState(
            config,
            self._prefix_redis,
            self._bulk_redis,
            self._redis_memory,
            public=public,
            preparer=self.preparer,
            models=self.models,
            health_monitor=self._health_monitor,
            clock=clock,
            wall_clock=wall_clock,
            randomness=randomness,
            max_payload_bytes=lambda: self._bus.max_payload_bytes,
            count_response=self.metrics.count_stored_response,
        )
        self._background = Background()
        self._is_leaving = False
        self.metrics.watch_open_streams(lambda: len(self._driver))
        self.metrics.watch_fleet(self._members)
        self._certificate: Certificate | None = None
        if config.http_cert:
            self._certificate = Certificate(config.http_cert, config.http_key)
        self._body_budget = BodyBudget()
        self.submission = self._submission(wall_clock)
        self._answers = answers(self.preparer, self.model_names)
        self._web_server = self._http_server(self._app(wall_clock))
        self._nats_api: NatsApi | None = None
        self._clients = clients
        if clients is not None:
            self._nats_api = self._api_over(clients, wall_clock)

    def _app(self, wall_clock: Callable[[], float]) -> ASGIApp:
        return build_app(
            submission=self.submission,
            preparer=self.preparer,
            answers=self._answers,
            models=self.models,
            names=self.model_names,
            prefix_store=self.stored.prefixes,
            response_store=self.stored.responses,
            api_keys=self.api_keys,
            metrics=self.metrics,
            readiness=self.readiness,
            new_request_id=self.new_request_id,
            wall_clock=wall_clock,
            clock=self._clock,
            keep_alive_s=self._config.keep_alive_s,
            max_body_bytes=self._config.max_body_bytes,
            body_budget=self._body_budget,
            version=installed_release(),
            cluster=self._cluster_routes,
            http_host=self._config.http_host,
            has_page=self._config.page,
            metrics_token=self._config.metrics_token,
            find_timeline=self.telemetry.find,
            read_info=self._info,
            cors_origins=self._config.cors_origin,
        )

    def _submission(self, wall_clock: Callable[[], float]) -> Submission:
        config = self._config
        return Submission(
            capacity=self.capacity,
            preparer=self.preparer,
            limits=self._limits,
            usage=self._usage,
            models=self.models,
            names=self.model_names,
            driver=self._driver,
            metrics=self.metrics,
            clock=self._clock,
            wall_clock=wall_clock,
            unsent=UnsentOutput(config.max_unsent_bytes, config.max_tenant_unsent_bytes),
            telemetry=self.telemetry,
            states=self.stored.endpoints,
        )

    def _api_over(self, clients: NatsBus, wall_clock: Callable[[], float]) -> NatsApi:
        return NatsApi.of(
            clients.untyped,
            self._config,
            self.models,
            self.model_names,
            self._answers,
            api_keys=self.api_keys,
            submission=self.submission,
            metrics=self.metrics,
            budget=self._body_budget,
            clock=self._clock,
            new_request_id=self.new_request_id,
            service_id=self._randomness.bytes(11).hex(),
            started_at=wall_clock(),
        )

    def _http_server(self, app: ASGIApp) -> WebServer:
        return WebServer(
            app,
            self._config.http_host,
            self._config.http_port,
            write_timeout_s=self._config.write_timeout_s,
            on_slow_client=self.metrics.count_slow_client,
            tenant_of=lambda headers: self.api_keys.known_tenant_id(authorization_of(headers)),
            certificate=self._certificate,
        )

    @property
    def http_address(self) -> str:
        return self._web_server.url

    async def load_tokenizer(self) -> None:
        """Optional first call: no prompt for the gateway's own model then waits for it."""
        if self._models.own is not None:
            await self._models.own.renderer.load_tokenizer()

    # ── process.Service ──────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        await self._driver.start()
        self._health_monitor.on_heartbeat(self.catalog.observe)
        self._health_monitor.on_heartbeat(self.metrics.stopped_workers.observe)
        self._health_monitor.on_lost(lambda process_id, _: self.catalog.lost(process_id))
        self._health_monitor.on_heartbeat(self._cluster.observe)
        self._health_monitor.on_lost(self._cluster.lose)
        await self.api_keys.warm_up()
        self._limits.start()
        self._usage.start(self.submission.count_usage)
        await self._bus.serve(trace(self._bus.process_id), ReadTimeline, self._read_timeline)
        await self._health_monitor.start()
        await self.telemetry.open()
        with suppress(StoreUnavailable):  # it is read again and again
            await self._models.registry.refresh()
        self._background.start_own(self._models.registry.run())
        self._background.start_own(self.stored.public_watcher.run())
        self._background.start_own(self._redis_memory.run())
        if self._certificate is not None:
            self._background.start_own(self._certificate.watch(self._clock))
        await self._web_server.start()
        if self._nats_api is not None:
            await self._nats_api.start(lambda: self._cluster_readiness().ready)
        await self._health_monitor.transition_to("ready")
        log.info("listening", http_address=self.http_address)

    async def drain(self) -> None:
        """Serves for `lame_duck_s`, while /ready sends balancers away. Then rejects new requests,
        and waits for running ones, at most until their deadlines.
        """
        self._is_leaving = True
        self._web_server.close_after_responses()
        if self._nats_api is not None:
            await self._nats_api.leave()  # NATS sends to other gateways from now on
        await self._health_monitor.transition_to("draining")
        await self._clock.sleep(self._config.lame_duck_s)
        self.capacity.is_draining = True
        await self._cluster.close()
        await self._driver.idle()
        if self._nats_api is not None:
            await self._nats_api.idle()
        await self._usage.flush()

    async def stop(self) -> None:
        self.capacity.is_draining = True
        self._driver.close_all(NoCapacity("the gateway stops", retry_after_s=1.0))
        await self._cluster.close()
        await self._web_server.stop()
        if self._nats_api is not None:
            await self._nats_api.stop()
        await self._background.stop()
        await self._driver.stop()
        await self.stored.responses.stop()
        await self._usage.stop()  # waits for a Redis that is away
        await self._limits.stop()
        await self._health_monitor.stop()
        await self.telemetry.close()
        await self._pool.close()
        await self._models.checks.close()
        await self._models.texts.close()
        if self._models.own is not None:
            await self._models.own.renderer.close()
        if self._clients is not None:
            await self._clients.close()
        await self._bus.close()
        await self._store.close()
        await self._prefix_redis.close()
        await self._bulk_redis.close()
        if self._redis_replica is not None:
            await self._redis_replica.close()

    def _read_timeline(self, question: ReadTimeline) -> TimelineRead:
        return TimelineRead(timeline=self.telemetry.find(question.request_id))

    def _num_gateways(self) -> int:
        live = {each.process_id for each in self._health_monitor.fleet.live("gateway")}
        return len(live | {self._config.process_id})

    def _region_of(self, process_id: str) -> str:
        if process_id == self._config.process_id:
            return self._config.region
        heartbeat = self._health_monitor.fleet.heartbeat_of(process_id)
        return "" if heartbeat is None else heartbeat.region

    def new_request_id(self) -> str:
        return self._randomness.bytes(12).hex()

    def _count(self, report: Report) -> None:
        match report:
            case ReportResubmission(cause=cause):
                self.metrics.count_resubmission(cause)
            case ReportNumericsChange():
                self.metrics.count_numerics_change()
            case ReportUnlikePrefill():
                self.metrics.count_unlike_prefill()

    def _info(self) -> ServerInfo:
        config = self._config
        return ServerInfo(
            version=installed_release(),
            process_id=config.process_id,
            region=config.region,
            models=sorted(self.models.names),
            max_requests=config.max_requests,
            num_open_requests=len(self._driver),
            max_body_bytes=config.max_body_bytes,
            default_max_tokens=config.default_max_tokens,
            request_timeout_s=config.request_timeout_s,
        )

    def _members(self) -> list[Member]:
        """All processes that are known, this one too."""
        fleet, own = self._health_monitor.fleet, self._health_monitor.describe()
        others = (each for each in fleet.everyone() if each.process_id != own.process_id)
        return [Member(own), *(Member(each, fleet.is_live(each.process_id)) for each in others)]

    def report(self) -> ProcessReport:
        own = self._health_monitor.describe()
        return ProcessReport(own, takes_work=self.readiness().ready, own=self.metrics.own)

    def readiness(self) -> Readiness:
        """Ready over HTTP and NATS."""
        found = self._cluster_readiness()
        if not found.ready or self._nats_api is None or self._nats_api.has_joined:
            return found
        return msgspec.structs.replace(found, ready=False, reason="not in the queue group yet")

    def _cluster_readiness(self) -> Readiness:
        return self.catalog.readiness(
            is_connected=self._bus.is_connected,
            is_draining=self._is_leaving or self.capacity.is_draining,
            redis=self._redis_state(),
        )

    def _redis_state(self) -> str:
        found = self.api_keys.redis_state
        return "rejects writes" if found == "ok" and self._store.load().rejects_writes else found
