"""The routes `/health`, `/version`, `/ready` and `/metrics` for load balancers and operators,
without an API key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from litestar import HttpMethod, Request, Response, route
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler
from prometheus_client import CONTENT_TYPE_LATEST

from services.gateway.http.openapi import described
from services.gateway.models.live_models import PublicReadiness, Readiness
from services.gateway.observability.metrics.rendered import RenderedMetrics
from services.gateway.tenancy.api_keys import ApiKeys, bearer_of
from shared.errors import AuthenticationFailed
from shared.lifecycle.release import installed_release
from shared.secrets.secret import Secret

METRICS_TYPE = CONTENT_TYPE_LATEST.removesuffix("; charset=utf-8")  # Litestar adds the charset
READS = partial(route, http_method=[HttpMethod.GET, HttpMethod.HEAD])


class Health(msgspec.Struct, frozen=True):
    status: str
    """How the gateway is."""


class Version(msgspec.Struct, frozen=True):
    version: str
    """The release of the gateway."""


class StateRoutes:
    """The endpoints of a gateway's state. `metrics_token` protects the metrics; without one
    everybody may read them. `is_operator` returns whether an Authorization header has the
    operator's token.
    """

    def __init__(
        self,
        api_keys: ApiKeys,
        readiness: Callable[[], Readiness],
        metrics: RenderedMetrics,
        metrics_token: Secret,
        is_operator: Callable[[str | None], bool],
    ) -> None:
        self._api_keys = api_keys
        self._readiness = readiness
        self._metrics = metrics
        self._metrics_token = metrics_token
        self._is_operator = is_operator

    def handlers(self, error: type[Any]) -> list[HTTPRouteHandler]:
        """Returns the route handlers. `error` is the type of a rejection in the OpenAPI
        document.
        """
        metrics = READS("/metrics", include_in_schema=False, guards=[self._authorize_metrics])
        return [
            READS("/health", summary="Whether the process is alive")(self.health),
            READS("/version", summary="The release")(self.version),
            READS(
                "/ready",
                summary="Whether a request would be served",
                description="503 with the same body if not; the operator's token shows more.",
                responses=described(PublicReadiness, error),
            )(self.ready),
            metrics(self.metrics),
        ]

    async def _authorize_metrics(
        self, connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler
    ) -> None:
        """Raises AuthenticationFailed if the metrics need a token and the request has another. Two
        readings of the counters show the activity of other tenants.
        """
        if not self._metrics_token.accepted:
            return
        if not self._metrics_token.matches(bearer_of(connection.headers.get("authorization"))):
            raise AuthenticationFailed("the token for metrics is not valid")

    async def health(self) -> Health:
        """Returns 200: the process is alive."""
        return Health("ok")

    async def ready(self, request: Request[Any, Any, Any]) -> Response[PublicReadiness]:
        """Returns 200 if a request would be served now, else 503; to the operator's token also the
        names of the processes.
        """
        await self._api_keys.poll_redis()
        readiness = self._readiness()
        is_operator = self._is_operator(request.headers.get("authorization"))
        body = readiness if is_operator else readiness.public
        return Response(body, status_code=200 if readiness.ready else 503)

    async def version(self) -> Version:
        return Version(installed_release())

    async def metrics(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        """Returns the metrics, with `names=vllm` under vLLM's names. Returns 400 for
        other names.
        """
        text = await self._metrics.text(request.query_params.get("names", "hearth"))
        return Response(text, media_type=METRICS_TYPE)
