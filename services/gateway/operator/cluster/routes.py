"""The endpoints `GET /v1/cluster`, its `/events`, `/tenants` and `/audit`, for the operator alone:
a tenant may learn neither the load nor the timing of others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.response import Response, Stream

from services.gateway.http.server import ON_AUTHENTICATED, OPERATOR
from services.gateway.operator.cluster.feed import ClusterFeed
from services.gateway.operator.cluster.state import ClusterSnapshot, ClusterView
from services.gateway.operator.cluster.tenants import TenantsReport, TenantUsage
from services.gateway.tenancy.api_keys import bearer_of
from shared.clock import Clock
from shared.errors import AuthenticationFailed, InvalidRequest, Overloaded
from shared.lifecycle.health import Fleet
from shared.secrets.secret import Secret
from shared.store import Store
from shared.tenancy import audit
from shared.tenancy.audit import AuditLine

Connection = ASGIConnection[Any, Any, Any, Any]
AUDIT_LINES = 200
_STREAMED = {"cache-control": "no-store", "x-accel-buffering": "no"}


class ClusterRoutes:
    """The endpoints of the cluster. Nobody may read them without an `operator_token`."""

    def __init__(
        self, feed: ClusterFeed, tenants: TenantUsage, store: Store, operator_token: Secret
    ) -> None:
        self.feed = feed
        self._store = store
        self._tenants = tenants
        self._operator_token = operator_token

    @classmethod
    def of(
        cls,
        fleet: Fleet,
        store: Store,
        clock: Clock,
        wall_clock: Callable[[], float],
        operator_token: Secret,
    ) -> Self:
        view = ClusterView(fleet, clock.now, wall_clock)
        tenants = TenantUsage(store, clock, wall_clock, view.tenant_sites, view.tenant_refusals)
        return cls(ClusterFeed(view), tenants, store, operator_token)

    def is_operator(self, header: str | None) -> bool:
        """Whether an Authorization header has the operator's token. False if no token is
        configured.
        """
        try:
            return self._operator_token.matches(bearer_of(header))
        except AuthenticationFailed:
            return False

    async def authorize(self, connection: Connection, _: BaseRouteHandler) -> None:
        if not self.is_operator(connection.headers.get("authorization")):
            raise AuthenticationFailed("the operator token is not valid")
        on_authenticated = connection.scope["state"].get(ON_AUTHENTICATED)
        if on_authenticated is not None:
            on_authenticated(OPERATOR)

    async def snapshot(self) -> Response[ClusterSnapshot]:
        return Response(self.feed.state.snapshot(), headers={"cache-control": "no-store"})

    async def tenants(self) -> Response[TenantsReport]:
        return Response(await self._tenants.report(), headers={"cache-control": "no-store"})

    async def audit(self, request: Request[Any, Any, Any]) -> Response[list[AuditLine]]:
        """Returns the last `count` deletions and refusals, the oldest first. What operators have
        done is for their own Redis user alone. Raises InvalidRequest, StoreUnavailable.
        """
        given = request.query_params.get("count", str(AUDIT_LINES))
        if not given.isdecimal() or not 1 <= int(given) <= audit.MAX_LINES:
            problem = f"count {given[:64]!r} is not from 1 to {audit.MAX_LINES}"
            raise InvalidRequest(problem, param="count")
        lines = await audit.newest(self._store, int(given), ("deletion", "refusal"))
        return Response(lines, headers={"cache-control": "no-store"})

    async def events(self) -> Stream:
        if self.feed.is_full:
            raise Overloaded("too many clients read the cluster's events")
        return Stream(self.feed.events(), media_type="text/event-stream", headers=_STREAMED)
