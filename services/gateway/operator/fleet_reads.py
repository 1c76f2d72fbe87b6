"""Answers observers who ask a gateway for the fleet over NATS."""

from __future__ import annotations

from collections.abc import Callable

from services.gateway.models.live_models import Readiness
from services.gateway.operator.cluster.state import ClusterView
from services.gateway.operator.servers import Servers
from shared.fleet.read_fleet import MAX_PROCESSES, FleetRead, ReadFleet, RecentFigures
from shared.subjects import READ_FLEET, READ_FLEET_GROUP, fleet
from shared.transport.bus import Bus


class FleetReads:
    """`uptime_s` returns the time since the gateway's start: the oldest one knows most losses."""

    def __init__(
        self,
        bus: Bus,
        cluster: ClusterView,
        servers: Servers,
        readiness: Callable[[], Readiness],
        uptime_s: Callable[[], float],
    ) -> None:
        self._bus = bus
        self._cluster = cluster
        self._servers = servers
        self._readiness = readiness
        self._uptime_s = uptime_s

    async def serve(self) -> None:
        await self._bus.serve(fleet(self._bus.process_id), ReadFleet, self._read)
        await self._bus.serve(READ_FLEET, ReadFleet, self._read, queue=READ_FLEET_GROUP)

    async def _read(self, _: ReadFleet) -> FleetRead:
        await self._servers.poll()
        return FleetRead(
            gateway_id=self._bus.process_id,
            uptime_s=self._uptime_s(),
            processes=tuple(self._cluster.rows()[:MAX_PROCESSES]),
            redis=self._servers.redis,
            nats=self._servers.nats,
            unready=self._readiness().reason or "",
            recent=self._recent(),
            rejected=self._cluster.recent_rejections,
            rejected_day=self._cluster.rejected_day.totals,
            hosts=self._cluster.hosts(),
            demands=self._cluster.demands(),
            links=self._cluster.links(),
            tenant_sites=self._cluster.tenant_sites(),
            tenant_refusals=self._cluster.tenant_refusals(),
        )

    def _recent(self) -> RecentFigures | None:
        current = self._cluster.history.current
        if current is None:
            return None
        return RecentFigures(
            requests_per_s=current.requests_per_s,
            ttft_p50_s=current.ttft_p50_s,
            ttft_p99_s=current.ttft_p99_s,
        )
