"""The routes of operators and load balancers, which belong to no dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from litestar.handlers import HTTPRouteHandler

from services.gateway.models.gateway_models import GatewayModels
from services.gateway.models.live_models import Readiness
from services.gateway.observability.metrics.gateway_metrics import GatewayMetrics
from services.gateway.observability.metrics.rendered import RenderedMetrics
from services.gateway.observability.telemetry.telemetry import RequestTelemetry
from services.gateway.operator.cluster.faults import FaultRoutes
from services.gateway.operator.cluster.kept_history import HistoryKeeper
from services.gateway.operator.cluster.routes import ClusterRoutes
from services.gateway.operator.fleet_reads import FleetReads
from services.gateway.operator.page_handlers import page_handlers
from services.gateway.operator.server_info import ServerInfoRoutes, server_info
from services.gateway.operator.servers import Servers
from services.gateway.operator.state_routes import READS, StateRoutes
from services.gateway.operator.timeline_routes import TimelineRoutes
from services.gateway.tenancy.tenancy import Tenancy
from shared.clock import Clock
from shared.config import GatewayConfig
from shared.lifecycle.heartbeat import HealthMonitor
from shared.transport.bus import Bus


class OperatorRoutes:
    """Builds the routes of one gateway. `num_open` returns the number of running requests, and
    `wall_clock` Unix seconds.
    """

    def __init__(
        self,
        config: GatewayConfig,
        bus: Bus,
        health_monitor: HealthMonitor,
        tenancy: Tenancy,
        models: GatewayModels,
        metrics: GatewayMetrics,
        *,
        readiness: Callable[[], Readiness],
        telemetry: RequestTelemetry,
        num_open: Callable[[], int],
        clock: Clock,
        wall_clock: Callable[[], float],
    ) -> None:
        self._config = config
        metrics_token = config.secret("metrics_token")
        self._cluster = ClusterRoutes.of(
            health_monitor.fleet,
            tenancy.stores.slow,
            clock,
            wall_clock,
            config.secret("operator_token"),
        )
        self.feed = self._cluster.feed
        self.servers = Servers(tenancy, bus, clock)
        self.fleet_reads = FleetReads(
            bus,
            self.feed.state,
            self.servers,
            readiness,
            lambda: health_monitor.uptime_s,
        )
        self.history = HistoryKeeper(
            tenancy.stores.slow, self.feed.state, clock, is_on=bool(config.operator_token)
        )
        self._faults = FaultRoutes(config.fault_socket, config.fault_token, self.feed.state.events)
        models.registry.on_change(lambda: self.feed.state.observe_registry(models.registry.models))
        is_operator = self._cluster.is_operator
        self._timelines = TimelineRoutes(
            telemetry.find, telemetry.recent.of, tenancy.api_keys, is_operator
        )
        self._state = StateRoutes(
            tenancy.api_keys,
            readiness,
            RenderedMetrics(metrics.render, clock),
            metrics_token,
            is_operator,
        )
        self._info = ServerInfoRoutes(
            lambda: server_info(config, sorted(models.served.names), num_open()),
            metrics_token,
            is_operator,
        )

    def handlers(self, error: type[Any]) -> list[HTTPRouteHandler]:
        """Returns the route handlers. `error` is the type of a rejection in the OpenAPI
        document.
        """
        info = READS("/server_info", include_in_schema=False, guards=[self._info.authorize])
        return [
            *self._timelines.handlers(error),
            *self._state.handlers(error),
            info(self._info.server_info),
            *page_handlers(
                self._cluster,
                self._faults,
                http_host=self._config.http_host,
                has_page=self._config.page,
            ),
        ]
