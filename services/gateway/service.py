"""The gateway process: HTTP on one side, the recovery core on the bus on the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import structlog

from services.gateway.app import build_app
from services.gateway.body_budget import BodyBudget
from services.gateway.dialects.dialect import Dialect, DialectParts
from services.gateway.dialects.dialect_table import DIALECTS
from services.gateway.dialects.open_dialects import OpenDialects
from services.gateway.dialects.transport_parts import TransportParts
from services.gateway.http.server import WebServer
from services.gateway.images.pixel_access import open_pixel_holder
from services.gateway.models.gateway_models import GatewayModels
from services.gateway.models.live_models import Readiness
from services.gateway.models.preparation_pools import PreparationPools
from services.gateway.nats_api.api import NatsApi
from services.gateway.observability.metrics.gateway_metrics import GatewayMetrics
from services.gateway.observability.metrics.rejection_log import RejectionLog
from services.gateway.observability.telemetry.telemetry import RequestTelemetry
from services.gateway.operator.operator_routes import OperatorRoutes
from services.gateway.receipts.places import Places
from services.gateway.receipts.receipts import Receipts
from services.gateway.receipts.site_receipts import SiteReceipts
from services.gateway.request.preparer import Preparer
from services.gateway.request.submission import Submission
from services.gateway.sites.site_service import SiteService
from services.gateway.sites.site_tenants import SiteTenants
from services.gateway.streams.actions import Report, ReportResubmission
from services.gateway.streams.stream_driver import StreamDriver
from services.gateway.tenancy.stores import GatewayStores
from services.gateway.tenancy.tenancy import Tenancy
from shared.background import Background
from shared.clock import Clock, MonotonicClock
from shared.config import GatewayConfig, check, weights_of_sites
from shared.errors import NoCapacity
from shared.lifecycle.heartbeat import HealthMonitor, Loads
from shared.lifecycle.identity import connect, connect_to_clients
from shared.metrics.families.member import Member
from shared.metrics.process_report import ProcessReport
from shared.pixels.pixel_frames import IMAGES_FEATURE
from shared.randomness import Randomness, SystemRandomness
from shared.sites.linked_sites import LinkedSites
from shared.subjects import is_at_site
from shared.transport.bus import Bus, NatsBus

log = structlog.get_logger(__name__)


class GatewayService:
    """A `process.Service` that composes the gateway's parts."""

    def __init__(
        self,
        config: GatewayConfig,
        bus: Bus,
        stores: GatewayStores,
        pools: PreparationPools,
        *,
        clock: Clock,
        randomness: Randomness,
        wall_clock: Callable[[], float] = time.time,
        clients: NatsBus | None = None,
        dialects: Sequence[Dialect] = DIALECTS,
    ) -> None:
        """`clients`: the connection of the API over NATS, or None. `wall_clock`: seconds since
        1970. The gateway closes the connections and the pools.
        """
        self._config = config
        self._bus = bus
        self._clients = clients
        self._clock = clock
        self._wall_clock = wall_clock
        self._randomness = randomness
        self._background = Background()
        self._is_leaving = False
        self.metrics = metrics = GatewayMetrics(config.process_id, config.site)
        expected = weights_of_sites(config.linked_site)
        linked = LinkedSites(bus, clock, config.site, expected) if config.site else None
        self._rejection_log = RejectionLog(metrics.rejections, clock)
        self._health_monitor = self._new_health_monitor(stores, linked)
        self.pixels = open_pixel_holder(config, bus, self._health_monitor)
        self.tenancy = self._new_tenancy(stores)
        self.api_keys, self._limits = self.tenancy.api_keys, self.tenancy.limits
        self._usage = self.tenancy.usage
        self._models = GatewayModels(
            config, pools, self._health_monitor.fleet, stores, clock=clock, randomness=randomness
        )
        self._driver = StreamDriver(
            bus,
            clock,
            self._health_monitor,
            on_report=partial(self._on_report, linked),
            num_free=lambda: self.capacity.num_free,
        )
        self._places = Places(
            config.process_id,
            config.site,
            config.region,
            lambda site: "" if linked is None else linked.region_of(site) or "",
        )
        self.telemetry = self._request_telemetry()
        self.receipts = Receipts(config, self._places, clock, wall_clock, randomness)
        self.site_receipts = SiteReceipts(
            self.receipts,
            self.telemetry.request_id_of,
            self.tenancy.record_of,
            bus,
            self._health_monitor,
        )
        budget = BodyBudget()
        self.preparer = self._new_preparer(pools, budget)
        self.capacity = self.preparer.capacity
        self.dialects = OpenDialects(dialects, self._dialect_parts())
        self.submission = self._submission()
        self._operator = self._operator_routes()
        self.transport = self._transport_parts(budget)
        self._web_server = WebServer.of(
            config,
            build_app(config, self.transport, self._operator),
            self.api_keys,
            on_slow_client=metrics.count_slow_client,
        )
        self._nats_api = None if clients is None else self._api_over(clients)
        self._sites = None if linked is None else self._site_service(linked)
        self._watch()

    def _new_health_monitor(
        self, stores: GatewayStores, linked: LinkedSites | None
    ) -> HealthMonitor:
        return HealthMonitor(
            self._bus,
            self._clock,
            self._randomness,
            roles=("gateway",),
            reads_models=True,
            region=self._config.region,
            loads=Loads(
                gateway=self.metrics.load,
                store=stores.fast.load,
                links=tuple if linked is None else linked.loads,
            ),
        )

    def _new_tenancy(self, stores: GatewayStores) -> Tenancy:
        return Tenancy(
            self._config,
            stores,
            self._clock,
            self._wall_clock,
            num_gateways=self._num_gateways,
            writer_id=f"{self._config.process_id}-{self._randomness.bytes(8).hex()}",
            refusals=self._health_monitor.refusals,
        )

    def _request_telemetry(self) -> RequestTelemetry:
        return RequestTelemetry.of(
            self._config.process_id,
            self._clock,
            self._wall_clock,
            self._randomness,
            self.metrics,
            self._places.region_of,
            self._config.trace_region,
            self._health_monitor.refusals,
        )

    def _new_preparer(self, pools: PreparationPools, budget: BodyBudget) -> Preparer:
        return Preparer.of(
            self._config,
            pools.requests,
            lambda: len(self._driver),
            self._clock,
            self._randomness,
            max_payload_bytes=lambda: self._bus.max_payload_bytes,
            budget=budget,
        )

    def _transport_parts(self, budget: BodyBudget) -> TransportParts:
        return TransportParts(
            dialects=self.dialects,
            submission=self.submission,
            api_keys=self.api_keys,
            metrics=self.metrics,
            max_body_bytes=self._config.max_body_bytes,
            max_image_body_bytes=self._max_image_body_bytes,
            clock=self._clock,
            new_request_id=self.new_request_id,
            budget=budget,
        )

    def _dialect_parts(self) -> DialectParts:
        return DialectParts(
            config=self._config,
            tenancy=self.tenancy,
            models=self._models,
            preparer=self.preparer,
            pixels=self.pixels,
            health_monitor=self._health_monitor,
            metrics=self.metrics,
            telemetry=self.telemetry,
            receipts=self.receipts,
            site_receipts=self.site_receipts,
            clock=self._clock,
            wall_clock=self._wall_clock,
            randomness=self._randomness,
        )

    def _submission(self) -> Submission:
        return Submission(
            self._config,
            self.preparer,
            self.tenancy,
            self._models,
            self._driver,
            metrics=self.metrics,
            telemetry=self.telemetry,
            pixels=self.pixels,
            states=self.dialects.states,
            receipts=self.receipts,
            clock=self._clock,
            wall_clock=self._wall_clock,
            randomness=self._randomness,
        )

    def _max_image_body_bytes(self) -> int:
        """Returns the limit of bodies with images; 0 while no model takes any."""
        has_images = self._models.live.has_feature(IMAGES_FEATURE)
        return self._config.max_image_body_bytes if has_images else 0

    def _operator_routes(self) -> OperatorRoutes:
        return OperatorRoutes(
            self._config,
            self._bus,
            self._health_monitor,
            self.tenancy,
            self._models,
            self.metrics,
            readiness=self.readiness,
            telemetry=self.telemetry,
            num_open=lambda: len(self._driver),
            clock=self._clock,
            wall_clock=self._wall_clock,
        )

    def _api_over(self, clients: NatsBus) -> NatsApi:
        return NatsApi(
            clients.untyped,
            self._config,
            self.transport,
            service_id=self._randomness.bytes(11).hex(),
            started_at=self._wall_clock(),
        )

    def _on_report(self, linked: LinkedSites | None, report: Report) -> None:
        self.metrics.count_report(report)
        if linked is not None and isinstance(report, ReportResubmission):
            linked.count(report.worker_id, "num_moved")

    def _site_service(self, linked: LinkedSites) -> SiteService:
        return SiteService(
            self._config,
            self._bus,
            self._clock,
            self._health_monitor,
            self._driver,
            linked,
            check_capacity=self.capacity.check,
            tenants=SiteTenants(
                self._config,
                self._bus,
                self._clock,
                self.tenancy,
                self._health_monitor,
                wall_clock=self._wall_clock,
            ),
        )

    def _watch(self) -> None:
        """Exports what the parts count themselves."""
        metrics, models = self.metrics, self._models
        metrics.watch_preparation(lambda: models.loads)
        metrics.watch_loaded_models(lambda: models.num_loaded)
        metrics.watch_redis(lambda: self.tenancy.redis_memory.use)
        metrics.watch_deletions(lambda: self.tenancy.removed.unfinished_s)
        metrics.watch_machine(self._config.nats_tls, lambda: self._bus.server_certificate_ends_at)
        metrics.watch_certificate(lambda: self._web_server.certificate_expires_at)
        metrics.watch_open_streams(lambda: len(self._driver))
        metrics.watch_regions(self._places.region_of)
        metrics.watch_fleet(self._members)
        if self._sites is not None:
            metrics.watch_copied_tenants(lambda: self.tenancy.copy_counts(self._clock.now()))
        models.registry.on_change(lambda: metrics.retain_models(models.served.names))

    @property
    def http_address(self) -> str:
        return self._web_server.url

    async def load_tokenizer(self) -> None:
        """Optional first call: no prompt for the gateway's own model then waits for it."""
        await self._models.load_tokenizer()

    # ── process.Service ──────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        await self._driver.start()
        await self.pixels.start()
        self._health_monitor.on_heartbeat(self._places.observe)
        self._health_monitor.on_heartbeat(self._models.live.observe)
        self._health_monitor.on_heartbeat(self.tenancy.refusal_audit.observe)
        self._health_monitor.on_heartbeat(self.metrics.stopped_workers.observe)
        self._health_monitor.on_lost(lambda process_id, _: self._models.live.lost(process_id))
        self._health_monitor.on_heartbeat(self._operator.feed.observe)
        self._health_monitor.on_lost(self._operator.feed.lose)
        await self.api_keys.warm_up()
        await self._operator.history.restore()
        self._limits.start()
        self._usage.start(self.submission.count_usage)
        await self.telemetry.serve(self._bus)
        await self.site_receipts.serve()
        await self._operator.fleet_reads.serve()
        await self._health_monitor.start()
        await self.telemetry.open()
        await self._models.read_registry()
        self._background.start_own(self._models.registry.run())
        self._background.start_own(self.tenancy.redis_memory.run())
        self._background.start_own(self.tenancy.declare_regions())
        removed = self.tenancy.removed.run(self._driver.close_tenant, self._forget_tenant)
        self._background.start_own(removed)
        self._background.start_own(self._rejection_log.run())
        self._background.start_own(self.receipts.run())
        self._background.start_own(self.tenancy.refusal_audit.run())
        changed = self.tenancy.watch_regions(
            self._driver.change_regions,
            self.receipts.change_regions,
            forget=self._models.checks.forget,
        )
        self._background.start_own(changed)
        self._background.start_own(self._operator.servers.watch())
        if self._operator.history.is_on:
            self._background.start_own(self._operator.history.run())
        for dialect in self.dialects.opened:
            for task in dialect.tasks:
                self._background.start_own(task())
        await self._web_server.start(self._clock)
        if self._nats_api is not None:
            await self._nats_api.start(lambda: self._cluster_readiness().ready)
        await self._health_monitor.transition_to("ready")
        if self._sites is not None:
            await self._sites.start()
        log.info("listening", http_address=self.http_address)

    def _forget_tenant(self, tenant_id: str) -> None:
        self.receipts.remove_tenant(tenant_id)
        self._models.checks.forget(tenant_id)

    async def drain(self) -> None:
        """Serves for `lame_duck_s`, while /ready sends balancers away. Then rejects new requests,
        and waits for running ones, at most until their deadlines.
        """
        self._is_leaving = True
        self._web_server.close_after_responses()
        if self._nats_api is not None:
            await self._nats_api.leave()  # NATS sends to other gateways from now on
        await self._health_monitor.transition_to("draining")
        if self._sites is not None:
            await self._sites.leave()
        await self._clock.sleep(self._config.lame_duck_s)
        self.capacity.is_draining = True
        await self._operator.feed.close()
        await self._driver.idle()
        if self._nats_api is not None:
            await self._nats_api.idle()
        await self._usage.flush()

    async def stop(self) -> None:
        self.capacity.is_draining = True
        self._driver.close_all(NoCapacity("the gateway stops", retry_after_s=1.0))
        await self._operator.feed.close()
        await self._web_server.stop()
        if self._nats_api is not None:
            await self._nats_api.stop()
        await self._background.stop()
        if self._sites is not None:
            await self._sites.stop()
        await self._driver.stop()
        await self.pixels.close()
        self._rejection_log.log_new()
        await self.dialects.stop()
        await self._usage.stop()  # waits for a Redis that is away
        await self._limits.stop()
        await self._health_monitor.stop()
        await self.telemetry.close()
        await self._models.close()
        if self._clients is not None:
            await self._clients.close()
        await self._bus.close()
        await self._operator.history.save()
        await self.tenancy.stores.close()

    def _num_gateways(self) -> int:
        live = {each.process_id for each in self._health_monitor.fleet.live("gateway")}
        return len(live | {self._config.process_id})

    def new_request_id(self) -> str:
        return self._randomness.bytes(12).hex()

    def _members(self) -> list[Member]:
        """Returns all known processes of this site, this one included."""
        fleet, own = self._health_monitor.fleet, self._health_monitor.describe()
        here = (each for each in fleet.everyone() if not is_at_site(each.process_id))
        others = (each for each in here if each.process_id != own.process_id)
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
        return self._models.live.readiness(
            is_connected=self._bus.is_connected,
            is_draining=self._is_leaving or self.capacity.is_draining,
            redis=self.tenancy.redis_state,
        )


async def build_gateway(config: GatewayConfig) -> GatewayService:
    """Starts the gateway's processes and connects it. Raises ConfigError for a bad configuration or
    model directory, and NatsBus.connect errors.
    """
    check(config)
    if not config.cluster_secret:
        log.warning("cluster_secret_missing", effect="workers can compute the root of any tenant")
    gateway = await connected_gateway(config, await PreparationPools.started(config))
    await gateway.load_tokenizer()
    return gateway


async def connected_gateway(
    config: GatewayConfig, pools: PreparationPools, dialects: Sequence[Dialect] = DIALECTS
) -> GatewayService:
    """Connects to NATS and Redis. Raises NatsBus.connect errors."""
    clock = MonotonicClock()
    bus = await connect(config, "gateway")
    return GatewayService(
        config,
        bus,
        GatewayStores.connect(config, clock),
        pools,
        clock=clock,
        randomness=SystemRandomness(),
        clients=await connect_to_clients(config),
        dialects=dialects,
    )
