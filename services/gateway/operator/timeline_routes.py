"""The timeline of a request over HTTP, for its tenant and for the operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from services.gateway.http.errors import RouteNotFound
from services.gateway.http.server import ON_AUTHENTICATED, OPERATOR
from services.gateway.tenancy.api_keys import ApiKeys
from shared.telemetry.timeline import Timeline

READER = "reader"  # key in a request's state: the tenant's id, or None for the operator


class TimelineRoutes:
    """The endpoint of timelines. `find` returns a timeline by its request's id. `is_operator`
    checks an Authorization header.
    """

    def __init__(
        self,
        find: Callable[[str], Timeline | None],
        api_keys: ApiKeys,
        is_operator: Callable[[str | None], bool],
    ) -> None:
        self._find = find
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

    async def timeline(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        """Returns the timeline as JSON. Raises RouteNotFound alike for an unknown or forgotten
        request and for one of another tenant or gateway.
        """
        found = self._find(str(request.path_params["request_id"]))
        reader = request.scope["state"][READER]
        if found is None or reader not in (None, found.tenant_id):
            raise RouteNotFound("this gateway knows no such request")
        return Response(msgspec.json.encode(found), media_type="application/json")
