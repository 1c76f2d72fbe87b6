"""A request's timeline over HTTP, to the tenant whose request it was."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response

from services.gateway.http.errors import RouteNotFound
from services.gateway.telemetry.timeline_ring import TimelineRing


class TimelineRoutes:
    def __init__(self, ring: TimelineRing) -> None:
        self._ring = ring

    async def timeline(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        """Returns 404 for an unknown or forgotten request, and for one of another tenant or of
        another gateway: they look the same.
        """
        found = self._ring.get(str(request.path_params["request_id"]))
        if found is None or found.tenant_id != request.state.tenant.tenant_id:
            raise RouteNotFound("this gateway knows no such request")
        return Response(
            msgspec.json.encode(found),
            media_type="application/json",
            headers={"x-request-id": request.state.request_id},
        )
