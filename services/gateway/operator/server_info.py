"""`GET /server_info`: how a gateway is configured, for its operators alone."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

import msgspec
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.response import Response

from services.gateway.tenancy.api_keys import bearer_of
from shared.errors import AuthenticationFailed


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`models`: by their names. Sizes in bytes, times in seconds."""

    version: str
    process_id: str
    region: str
    models: list[str]
    max_requests: int
    num_open_requests: int
    max_body_bytes: int
    default_max_tokens: int
    request_timeout_s: float


class ServerInfoRoutes:
    """`metrics_token`: empty: only the operator's opens it. `is_operator`: of an Authorization
    header.
    """

    def __init__(
        self,
        read: Callable[[], ServerInfo],
        metrics_token: str,
        is_operator: Callable[[str | None], bool],
    ) -> None:
        self._read = read
        self._metrics_token = metrics_token.encode()
        self._is_operator = is_operator

    async def authorize(
        self, connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler
    ) -> None:
        """Raises AuthenticationFailed."""
        header = connection.headers.get("authorization")
        if self._is_operator(header):
            return
        given = bearer_of(header).encode()
        if not self._metrics_token or not hmac.compare_digest(given, self._metrics_token):
            raise AuthenticationFailed("send the token of the metrics or of the operator")

    async def server_info(self) -> Response[ServerInfo]:
        return Response(self._read(), headers={"cache-control": "no-store"})
