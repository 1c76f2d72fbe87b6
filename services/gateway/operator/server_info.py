"""The route `GET /server_info`: the configuration of a gateway, for its operators alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.response import Response

from services.gateway.tenancy.api_keys import bearer_of
from shared.config import GatewayConfig
from shared.errors import AuthenticationFailed
from shared.lifecycle.release import installed_release
from shared.secrets.secret import Secret


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a gateway. `models` are names, sizes are bytes, times are seconds."""

    version: str
    process_id: str
    region: str
    models: list[str]
    max_requests: int
    num_open_requests: int
    max_body_bytes: int
    default_max_tokens: int
    request_timeout_s: float


def server_info(config: GatewayConfig, models: list[str], num_open_requests: int) -> ServerInfo:
    return ServerInfo(
        version=installed_release(),
        process_id=config.process_id,
        region=config.region,
        models=models,
        max_requests=config.max_requests,
        num_open_requests=num_open_requests,
        max_body_bytes=config.max_body_bytes,
        default_max_tokens=config.default_max_tokens,
        request_timeout_s=config.request_timeout_s,
    )


class ServerInfoRoutes:
    """The endpoint of ServerInfo. Without a `metrics_token` only the operator's is accepted.
    `is_operator` checks an Authorization header.
    """

    def __init__(
        self,
        read: Callable[[], ServerInfo],
        metrics_token: Secret,
        is_operator: Callable[[str | None], bool],
    ) -> None:
        self._read = read
        self._metrics_token = metrics_token
        self._is_operator = is_operator

    async def authorize(
        self, connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler
    ) -> None:
        """Raises AuthenticationFailed unless the token is the operator's or that of the metrics."""
        header = connection.headers.get("authorization")
        if self._is_operator(header):
            return
        if not self._metrics_token.matches(bearer_of(header)):
            raise AuthenticationFailed("send the token of the metrics or of the operator")

    async def server_info(self) -> Response[ServerInfo]:
        return Response(self._read(), headers={"cache-control": "no-store"})
