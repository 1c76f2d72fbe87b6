"""The gateway process: HTTP on one side, the recovery core on the bus on the other."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec
import structlog
from litestar.types import ASGIApp

from services.gateway.app import build_app
from services.gateway.dialects.admission import authorization_of
from services.gateway.dialects.anthropic.dialect import MESSAGES
from services.gateway.dialects.anthropic.signature import signing_state
from services.gateway.dialects.dialect_table import answers
from services.gateway.dialects.prefixes.prefix_tokenizer import PrefixTokenizer
from services.gateway.dialects.prefixes.public_prefix_watcher import PublicPrefixWatcher
from services.gateway.dialects.prefixes.store import PrefixStore
from services.gateway.dialects.responses.dialect import CREATE
from services.gateway.dialects.responses.storage.completion import BodyCompletion
from services.gateway.dialects.responses.storage.seal import Seal
from services.gateway.dialects.responses.storage.store import ResponseStore
from services.gateway.dialects.workers_ai.dialect import RUN, RunState
from services.gateway.http.body_budget import BodyBudget
from services.gateway.http.certificate import Certificate
from services.gateway.http.server import WebServer
from services.gateway.models.checked_model import checked_model
from services.gateway.models.encoding_pools import EncodingPools
from services.gateway.models.live_models import Catalog, Readiness
from services.gateway.models.loaded_texts import LoadedTexts
from services.gateway.models.model_check import CheckedModel
from services.gateway.models.model_list import TenantModels
from services.gateway.models.model_names import ModelNames
from services.gateway.models.served_models import ServedModels
from services.gateway.models.served_text import ServedModel, TextLoader, process_setup
from services.gateway.nats_api.api import NatsApi
from services.gateway.nats_api.endpoints import MODELS
from services.gateway.nats_api.listeners import Listeners
from services.gateway.nats_api.served_request import GatewayParts
from services.gateway.observability.metrics.gateway_metrics import GatewayMetrics
from services.gateway.observability.metrics.preparation import PoolLoad
from services.gateway.observability.telemetry.telemetry import RequestTelemetry
from services.gateway.observability.telemetry.tracing import open_tracing
from services.gateway.operator.cluster.feed import ClusterFeed
from services.gateway.operator.cluster.routes import ClusterRoutes
from services.gateway.operator.cluster.state import ClusterView
from services.gateway.operator.cluster.tenants import TenantUsage
from services.gateway.operator.server_info import ServerInfo
from services.gateway.preparation.preparation_pool import PreparationPool
from services.gateway.request.endpoint import EndpointState
from services.gateway.request.preparation import Preparation
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
from services.gateway.structured.grammars.checks import (
    CHECK_NICENESS,
    CHECK_PROCESS,
    MAX_WAIT_S,
    GrammarChecks,
)
from services.gateway.tenancy.api_keys import ApiKeys
from services.gateway.tenancy.limits import Limits
from services.gateway.tenancy.model_aliases import ModelAliases
from services.gateway.tenancy.redis_memory import RedisMemory
from services.gateway.tenancy.usage_counter import UsageCounter
from services.gateway.text.process_jobs import ProcessSetup
from shared.background import Background
from shared.block_hash import root_key
from shared.clock import Clock, MonotonicClock
from shared.config import GatewayConfig, check, redis_tls_of
from shared.errors import NoCapacity
from shared.lifecycle.heartbeat import HealthMonitor
from shared.lifecycle.identity import connect, connect_to_clients
from shared.lifecycle.release import installed_release
from shared.messages import ReadTimeline, TimelineRead
from shared.metrics.families.member import Member
from shared.metrics.process_report import ProcessReport
from shared.model_registry.reader import CatalogueReader
from shared.nats_urls import authority
from shared.randomness import Randomness, SystemRandomness
from shared.store import RedisStore, Store, StoreUnavailable
from shared.subjects import trace
from shared.tenancy.tenant import TenantRecord
from shared.transport.bus import Bus, NatsBus
from shared.transport.untyped_messages import UntypedMessages

log = structlog.get_logger(__name__)

PREPARATION_PROCESS = "services.gateway.dialects.preparation_process"
PREFIX_STORE_TIMEOUT_S = 2.0


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
        self._cluster = ClusterFeed(ClusterView(fleet, clock.now, wall_clock))
        public = PublicPrefixes(root_key(config.cluster_secret))
        setup = None if own is None else process_setup(own, config.tool_format)
        self._pool = preparation_pool(setup) if pool is None else pool
        check_pool = grammar_pool(setup) if check_pool is None else check_pool
        self._checks = GrammarChecks(check_pool)
        self.api_keys = ApiKeys(store, clock, replica=redis_replica)
        self._limits = Limits(store, clock, self._num_gateways)
        writer_id = f"{config.process_id}-{randomness.bytes(8).hex()}"
        self._usage = UsageCounter(store, clock, writer_id=writer_id, now=wall_clock)
        self.catalog = Catalog(self._health_monitor.fleet, config.served_name, clock)
        loader = TextLoader(self._pool, self._checks, tool_format=config.tool_format)
        self.metrics.watch_preparation(
            lambda: preparation_loads(
                requests=self._pool, prompts=loader.encoding, grammars=check_pool
            )
        )
        self._texts = LoadedTexts(loader.load, clock, max_loaded=config.max_loaded_models)
        self._own = None if own is None or setup is None else loader.text(own, setup)
        self._catalogue = CatalogueReader(self._prefix_redis, clock)
        self.models = ServedModels(
            self.catalog, self._own, self._catalogue, self._texts, randomness
        )
        self.model_aliases = ModelAliases(store, clock, is_native=self.models.has)
        self.model_names = ModelNames(self.models, self.model_aliases)
        self._catalogue.on_change(lambda: self.metrics.retain_models(self.models.names))
        self.metrics.watch_loaded_models(lambda: len(self._texts) + (own is not None))
        self._driver = StreamDriver(bus, clock, self._health_monitor, on_report=self._count)
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
        self._redis_memory = RedisMemory(
            self._prefix_redis,
            clock,
            max_response_bytes=config.max_stored_response_bytes,
            max_prefix_bytes=config.max_stored_prefix_bytes,
        )
        self.metrics.watch_redis(lambda: self._redis_memory.use)
        self.capacity = RequestCapacity(config.max_requests, lambda: len(self._driver))
        self.preparer = self._preparer(public)
        self.prefix_store, self._public_watcher = self._prefixes(public, wall_clock)
        self.response_store = ResponseStore(
            self._prefix_redis,
            clock,
            region=config.region,
            now=wall_clock,
            count=self.metrics.count_stored_response,
            ttl_s=config.response_ttl_s,
            max_all_bytes=lambda: self._redis_memory.max_response_bytes,
            bulk=self._bulk_redis,
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
            self._nats_api = self._api_over(clients.untyped, wall_clock)

    def _preparer(self, public: PublicPrefixes) -> Preparer:
        config = self._config
        return Preparer(
            Preparation(config, self._randomness, public),
            self.capacity,
            self._clock,
            max_payload_bytes=lambda: self._bus.max_payload_bytes,
            slots_per_tenant=config.preparations_per_tenant,
            max_waiting=config.max_requests // 2,  # others find room
            max_wait_s=config.request_timeout_s,
        )

    def _prefixes(
        self, public: PublicPrefixes, wall_clock: Callable[[], float]
    ) -> tuple[PrefixStore, PublicPrefixWatcher]:
        store = PrefixStore(
            self._prefix_redis,
            health_monitor=self._health_monitor,
            models=self.models,
            reader_of=self._prefix_tokenizer,
            wall_clock=wall_clock,
            max_all_bytes=lambda: self._redis_memory.max_prefix_bytes,
            region=self._config.region,
            root_key=root_key(self._config.cluster_secret),
        )
        watcher = PublicPrefixWatcher(
            public,
            self._prefix_redis,
            self._clock,
            models=self.models,
            reader_of=self._prefix_tokenizer,
            wall_clock=wall_clock,
        )
        return store, watcher

    def _prefix_tokenizer(self, model: ServedModel) -> PrefixTokenizer:
        return PrefixTokenizer(
            partial(self.preparer.tokenize, model.text),
            lambda: self._bus.max_payload_bytes,
            model.text.files.longest_token_chars,
        )

    def _app(self, wall_clock: Callable[[], float]) -> ASGIApp:
        return build_app(
            submission=self.submission,
            preparer=self.preparer,
            answers=self._answers,
            models=self.models,
            names=self.model_names,
            prefix_store=self.prefix_store,
            response_store=self.response_store,
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
            cluster=ClusterRoutes(
                self._cluster,
                TenantUsage(self._prefix_redis, self._clock, wall_clock),
                self._config.operator_token,
            ),
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
            states=self._endpoint_states(),
        )

    def _endpoint_states(self) -> dict[str, EndpointState]:
        secret = self._config.cluster_secret
        seal = Seal(secret, self._randomness.bytes) if secret else None
        run_state = RunState(self._randomness.bytes if self._config.padding else None)
        completion = BodyCompletion(self.response_store, seal, self._config.max_body_bytes)
        return {
            MESSAGES.name: signing_state(root_key(secret)),
            CREATE.name: completion.state,
            RUN.name: EndpointState(lambda _: run_state),
        }

    def _api_over(self, messages: UntypedMessages, wall_clock: Callable[[], float]) -> NatsApi:
        started_at = wall_clock()
        tenant_models = TenantModels(self.models, self.model_names, int(started_at))

        async def models(tenant: TenantRecord, _: bytes) -> bytes:
            return msgspec.json.encode(await tenant_models.all(tenant))

        parts = GatewayParts(
            api_keys=self.api_keys,
            submission=self.submission,
            answers={**self._answers, MODELS: models},
            listeners=Listeners(messages, self._clock),
            metrics=self.metrics,
            budget=self._body_budget,
            clock=self._clock,
            max_body_bytes=self._config.max_body_bytes,
            max_reply_bytes=lambda: messages.max_payload_bytes,
        )
        return NatsApi(
            messages,
            parts,
            new_request_id=self.new_request_id,
            max_requests=self._config.max_requests,
            process_id=self._config.process_id,
            service_id=self._randomness.bytes(11).hex(),
            version=installed_release(),
            started_at=started_at,
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
        scheme = "http" if self._certificate is None else "https"
        return f"{scheme}://{authority(*self._web_server.address)}"

    async def load_tokenizer(self) -> None:
        """Optional first call: no prompt for the gateway's own model then waits for it."""
        if self._own is not None:
            await self._own.renderer.load_tokenizer()

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
            await self._catalogue.refresh()
        self._background.start_own(self._catalogue.run())
        self._background.start_own(self._public_watcher.run())
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
        await self.response_store.stop()
        await self._usage.stop()  # waits for a Redis that is away
        await self._limits.stop()
        await self._health_monitor.stop()
        await self.telemetry.close()
        await self._pool.close()
        await self._checks.close()
        await self._texts.close()
        if self._own is not None:
            await self._own.renderer.close()
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


async def build_gateway(config: GatewayConfig) -> GatewayService:
    """Raises ConfigError for a bad configuration or model directory, and NatsBus.connect errors."""
    check(config)
    if not config.cluster_secret:
        log.warning("cluster_secret_missing", effect="workers can compute the root of any tenant")
    own, setup = None, None
    if config.model_dir is not None:
        given = (config.model_dir, config.response_template, config.tool_format)
        own = await asyncio.to_thread(checked_model, *given)
        setup = process_setup(own, config.tool_format)
    pool, check_pool = preparation_pool(setup), grammar_pool(setup)
    await asyncio.gather(pool.start(), check_pool.start())
    clock = MonotonicClock()
    bus = await connect(config, "gateway")
    tls = redis_tls_of(config)
    store = RedisStore(config.redis_url, clock, tls=tls)
    replica = RedisStore(config.redis_read_url, clock, tls=tls) if config.redis_read_url else None
    # Prefixes may be long, and stored responses longer: their slow replies must not trip the
    # breaker of the API key lookups, or that of each other.
    prefix_redis, bulk_redis = (
        RedisStore(config.redis_url, clock, timeout_s=PREFIX_STORE_TIMEOUT_S, tls=tls)
        for _ in range(2)
    )
    gateway = GatewayService(
        config,
        bus,
        store,
        own,
        clock=clock,
        randomness=SystemRandomness(),
        pool=pool,
        check_pool=check_pool,
        prefix_redis=prefix_redis,
        bulk_redis=bulk_redis,
        redis_replica=replica,
        clients=await connect_to_clients(config),
    )
    await gateway.load_tokenizer()
    return gateway


def preparation_pool(setup: ProcessSetup | None) -> PreparationPool:
    return PreparationPool(setup, module=PREPARATION_PROCESS)


def grammar_pool(setup: ProcessSetup | None) -> PreparationPool:
    return PreparationPool(
        setup, module=CHECK_PROCESS, max_wait_s=MAX_WAIT_S, niceness=CHECK_NICENESS, grows=True
    )


def preparation_loads(**pools: PreparationPool | EncodingPools) -> dict[str, PoolLoad]:
    return {
        name: PoolLoad(each.num_waiting, each.num_running, each.num_lost)
        for name, each in pools.items()
    }
