"""The messages between an observer who asks for the state of a fleet and a gateway that answers.

A gateway knows what heartbeats do not show: processes that are lost, and since when; speeds; Redis.
"""

from __future__ import annotations

import msgspec

from shared.fleet.fleet_view import ProcessView
from shared.fleet.host_view import HostView
from shared.fleet.link_view import LinkView
from shared.fleet.tenant_views import TenantRefusal, TenantSite
from shared.messages import Message, ProcessId, RoleDemand, TotalSeconds

MAX_PROCESSES = 8192
DAY_S = 86_400.0


class ServerView(msgspec.Struct, frozen=True, kw_only=True):
    """The state of Redis or NATS: "ok", or what is wrong. `for_s` are the seconds since its last
    change, or None if they are unknown.
    """

    state: str
    for_s: TotalSeconds | None = None

    @property
    def is_sound(self) -> bool:
        """Whether the server answers. A new Redis does, though it has no tenant yet."""
        return self.state in ("ok", "new")


class RecentFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of all gateways over the last minute. Times to first token are None without one."""

    requests_per_s: float
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """The rejected requests of one gateway with one error code. `at` is the Unix time of the last
    one, in seconds.
    """

    gateway_id: str
    code: str
    count: int
    at: float


class RejectedCode(msgspec.Struct, frozen=True, kw_only=True):
    """The rejected requests of all gateways with one error code within DAY_S. Times are Unix
    seconds, of the first and the last one.
    """

    code: str
    count: int
    first_at: float
    last_at: float


class ReadFleet(Message, frozen=True, kw_only=True):
    """Asks a gateway for the fleet. Observers send it; the reply is FleetRead."""


class FleetRead(Message, frozen=True, kw_only=True):
    """The fleet as one gateway sees it. `unready` is why it would reject a request now, or
    empty. `rejected` are requests of the last 15 minutes, of all gateways.
    """

    gateway_id: ProcessId
    uptime_s: TotalSeconds
    processes: tuple[ProcessView, ...]
    redis: ServerView
    nats: ServerView
    unready: str = ""
    recent: RecentFigures | None = None  # None before the gateway has counted
    rejected: tuple[Rejection, ...] = ()
    rejected_day: tuple[RejectedCode, ...] = ()
    hosts: tuple[HostView, ...] = ()
    demands: tuple[RoleDemand, ...] = ()
    links: tuple[LinkView, ...] = ()
    tenant_sites: tuple[TenantSite, ...] = ()
    tenant_refusals: tuple[TenantRefusal, ...] = ()

    @property
    def sender_id(self) -> str:
        return self.gateway_id
