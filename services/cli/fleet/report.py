"""What `hearth status` shows: the processes, Redis and NATS, as a gateway knows them or, if none
answers, as heartbeats show them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import msgspec

from services.local.processes.supervision_log import Restarts
from shared.fleet.fleet_view import FleetView, ProcessView, in_order_of_roles
from shared.fleet.host_view import HostView, ModelView
from shared.fleet.link_view import LinkView
from shared.fleet.read_fleet import (
    FleetRead,
    RecentFigures,
    RejectedCode,
    Rejection,
    ServerView,
)
from shared.fleet.tenant_views import TenantRefusal, TenantSite
from shared.messages import RoleDemand

UNKNOWN = ServerView(state="unknown")


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a fleet at one moment. `gateway_id` is the gateway that answered, or None.
    `unready` is why it would reject a request now, or empty. `rejected` are requests of the last
    15 minutes, `rejected_day` those of a day: they make no report unsound.
    """

    rows: Sequence[ProcessView]
    demands: Sequence[RoleDemand] = ()
    hosts: Sequence[HostView] = ()
    models: Sequence[ModelView] = ()
    redis: ServerView = UNKNOWN
    nats: ServerView = UNKNOWN
    gateway_id: str | None = None
    unready: str = ""
    recent: RecentFigures | None = None
    rejected: Sequence[Rejection] = ()
    rejected_day: Sequence[RejectedCode] = ()
    restarts: Sequence[Restarts] = ()  # of a local cluster, within the last hour
    links: Sequence[LinkView] = ()
    tenant_sites: Sequence[TenantSite] = ()
    tenant_refusals: Sequence[TenantRefusal] = ()

    @classmethod
    def of(
        cls,
        view: FleetView,
        read: FleetRead | None,
        now: float,
        *,
        models: Sequence[ModelView] | None = None,
        is_connected: bool = True,
    ) -> Self:
        """Returns the report of heartbeats, with what a gateway knows better if one answered.
        `models` of the hosts are those of the view by default.
        """
        models = view.models() if models is None else models
        local = {each.process_id: each for each in view.rows(now)}
        if read is None:
            return cls(
                rows=list(local.values()),
                nats=ServerView(state="ok" if is_connected else "unavailable"),
                demands=view.demands(),
                hosts=view.hosts(),
                models=models,
                links=view.links(),
                tenant_sites=view.tenant_sites(),
                tenant_refusals=view.tenant_refusals(),
            )
        known = {each.process_id: each for each in read.processes}
        return cls(
            rows=in_order_of_roles((local | known).values()),
            redis=read.redis,
            nats=read.nats,
            gateway_id=read.gateway_id,
            unready=read.unready,
            recent=read.recent,
            rejected=read.rejected,
            rejected_day=read.rejected_day,
            demands=read.demands,
            hosts=read.hosts,
            models=models,
            links=read.links,
            tenant_sites=read.tenant_sites,
            tenant_refusals=read.tenant_refusals,
        )

    @property
    def is_sound(self) -> bool:
        """Whether nothing is lost, cut or refused, no model failed, and nothing is unavailable. Who
        stopped in order is not lost.
        """
        has_loss = any(each.is_lost and not each.has_stopped for each in self.rows)
        has_loss = has_loss or any(each.loss for each in self.links)
        has_loss = has_loss or any(each.has_failed for each in self.models)
        is_served = self.gateway_id is not None and not self.unready
        return is_served and not has_loss and self.redis.is_sound and self.nats.is_sound

    def as_json(self) -> bytes:
        """Encodes the report. `roles` is there only if a scheduler advises, `hosts` and `models`
        only if there is a host, `links` only with links, `tenant_sites` with links or regions,
        `tenant_refusals` and `restarts` only after one.
        """
        line: dict[str, Any] = {
            "workers": [row for row in self.rows if row.is_worker],
            "services": [row for row in self.rows if not row.is_worker],
            "servers": {"redis": self.redis, "nats": self.nats},
            "gateway_id": self.gateway_id,
            "unready": self.unready,
            "recent": self.recent,
            "rejected": self.rejected,
            "rejected_day": self.rejected_day,
            "is_sound": self.is_sound,
        }
        if self.restarts:
            line["restarts"] = self.restarts
        if self.demands:
            line["roles"] = self.demands
        if self.links:
            line["links"] = self.links
        if self.links or self.tenant_sites:
            line["tenant_sites"] = self.tenant_sites
        if self.tenant_refusals:
            line["tenant_refusals"] = self.tenant_refusals
        if self.hosts:
            line |= {"hosts": self.hosts, "models": self.models}
        return msgspec.json.encode(line)
