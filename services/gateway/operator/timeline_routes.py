"""The last requests, and the timeline of one, over HTTP, for their tenants and for the operator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from litestar import Request, Response, get
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler

from services.gateway.http.errors import RouteNotFound
from services.gateway.http.openapi import SECURITY, described
from services.gateway.http.server import ON_AUTHENTICATED, OPERATOR
from services.gateway.observability.telemetry.recent_requests import RequestSummary
from services.gateway.tenancy.api_keys import ApiKeys
from shared.telemetry.timeline import Timeline

READER = "reader"  # key in a request's state: the tenant's id, or None for the operator


class RequestList(msgspec.Struct, frozen=True):
    """The latest requests first: at most 50 that a worker has seen, and 10 others."""

    requests: list[RequestSummary]
    """Ended requests, the latest first."""


class TimelineRoutes:
    """The endpoints of timelines. `find` returns a timeline by the id of its request or response.
    `recent` returns the last requests of a tenant, or of all. `is_operator` checks an Authorization
    header.
    """

    def __init__(
        self,
        find: Callable[[str], Timeline | None],
        recent: Callable[[str | None], list[RequestSummary]],
        api_keys: ApiKeys,
        is_operator: Callable[[str | None], bool],
    ) -> None:
        self._find = find
        self._recent = recent
        self._api_keys = api_keys
        self._is_operator = is_operator

    async def authorize(
        self, connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler
    ) -> None:
        """Stores the reader in the request's state. Raises AuthenticationFailed."""
        header, state = connection.headers.get("authorization"), connection.scope["state"]
        if self._is_operator(header):
            state[READER] = None
        else:
            state[READER] = (await self._api_keys.tenant_of(header)).tenant_id
        on_authenticated = state.get(ON_AUTHENTICATED)
        if on_authenticated is not None:
            on_authenticated(state[READER] or OPERATOR)

    def handlers(self, error: type[Any]) -> list[HTTPRouteHandler]:
        """Returns the route handlers. `error` is the type of a rejection in the OpenAPI
        document.
        """
        read = partial(get, guards=[self.authorize], security=SECURITY)
        requests = read(
            "/v1/requests",
            summary="Lists the last requests",
            description="Of this gateway: the tenant's, or all to the operator's token.",
            responses=described(RequestList, error, 401),
        )
        timeline = read(
            "/v1/requests/{request_id:str}/timeline",
            summary="Says where the time of a request went",
            description=(
                "By the id of the request or of its response. 404 from a gateway that did not "
                "serve the request, or has forgotten it."
            ),
            responses=described(Timeline, error, 401, 404),
        )
        return [requests(self.requests), timeline(self.timeline)]

    async def requests(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        """Returns the last requests of this gateway: the tenant's, or all to the operator."""
        found = RequestList(self._recent(request.scope["state"][READER]))
        return Response(msgspec.json.encode(found), media_type="application/json")

    async def timeline(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        """Returns the timeline as JSON. Raises RouteNotFound alike for an unknown or forgotten
        request and for one of another tenant or gateway.
        """
        found = self._find(str(request.path_params["request_id"]))
        reader = request.scope["state"][READER]
        if found is None or reader not in (None, found.tenant_id):
            raise RouteNotFound("this gateway knows no such request")
        return Response(msgspec.json.encode(found), media_type="application/json")
