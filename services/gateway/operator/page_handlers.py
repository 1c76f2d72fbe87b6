"""The routes of the page and of the cluster that it shows."""

from __future__ import annotations

from functools import partial

import msgspec
from litestar import HttpMethod, route
from litestar.handlers import HTTPRouteHandler
from litestar.types import Guard

from services.gateway.operator.cluster.faults import FaultRoutes
from services.gateway.operator.cluster.routes import ClusterRoutes
from services.gateway.operator.page.headers import HostCheck
from services.gateway.operator.page.routes import PageRoutes


class ServerName(msgspec.Struct, frozen=True):
    name: str


async def _index() -> ServerName:
    """Returns the server's name: Claude Code requests `/` before its first message."""
    return ServerName("hearth")


_HIDDEN = partial(route, http_method=[HttpMethod.GET, HttpMethod.HEAD], include_in_schema=False)


def page_handlers(
    cluster: ClusterRoutes, faults: FaultRoutes, *, http_host: str, has_page: bool
) -> list[HTTPRouteHandler]:
    host_check = HostCheck(http_host)
    guards: list[Guard] = [host_check, cluster.authorize]
    snapshot = _HIDDEN("/v1/cluster", guards=guards)(cluster.snapshot)
    tenants = _HIDDEN("/v1/cluster/tenants", guards=guards)(cluster.tenants)
    audit = _HIDDEN("/v1/cluster/audit", guards=guards)(cluster.audit)
    events = route(
        "/v1/cluster/events", http_method=HttpMethod.GET, include_in_schema=False, guards=guards
    )
    targets = _HIDDEN("/v1/cluster/faults", guards=guards)(faults.targets)
    inject = route(
        "/v1/cluster/faults",
        http_method=HttpMethod.POST,
        status_code=200,
        include_in_schema=False,
        guards=guards,
    )
    handlers: list[HTTPRouteHandler] = [
        *(snapshot, tenants, audit, events(cluster.events), targets, inject(faults.inject))
    ]
    if not has_page:
        handlers.append(_HIDDEN("/")(_index))
    else:
        page = PageRoutes()
        handlers.append(_HIDDEN("/", guards=[host_check])(page.index))
        handlers.append(_HIDDEN("/page/{name:str}", guards=[host_check])(page.file))
    return handlers
