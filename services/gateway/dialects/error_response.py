"""The responses to rejected requests over HTTP, in the form of their paths' dialects."""

from __future__ import annotations

from typing import Any

import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap

from services.gateway.dialects.dialect import Dialect
from services.gateway.dialects.missing_routes import missing_route
from services.gateway.dialects.transport_parts import TransportParts
from services.gateway.http.errors import RouteNotFound, error_of_http
from services.gateway.http.response import error_headers
from services.gateway.request.reservation import Reservation
from shared.errors import AuthenticationFailed, HearthError

log = structlog.get_logger(__name__)


def error_response(dialect: Dialect, error: HearthError, request_id: str) -> Response[Any]:
    """Logs the error if its message is not for clients."""
    if error.public_message != error.message:
        log.error("request_failed", request_id=request_id, code=error.code, error=error.message)
    status, body = dialect.encode_error(error, request_id)
    headers = {**dict.fromkeys(dialect.request_id_headers, request_id), **error_headers(error)}
    return Response(body, status_code=status, headers=headers, media_type="application/json")


class ErrorResponses:
    """The web framework's handlers of exceptions."""

    def __init__(self, parts: TransportParts) -> None:
        self._dialects = parts.dialects
        self._metrics = parts.metrics
        self._new_request_id = parts.new_request_id

    @property
    def handlers(self) -> ExceptionHandlersMap:
        return {
            HearthError: self._on_hearth_error,
            HTTPException: self._on_http_error,
            Exception: self._on_other_error,
        }

    def _on_hearth_error(
        self, request: Request[Any, Any, Any], error: HearthError
    ) -> Response[Any]:
        dialect = self._dialects.of_path(request.scope["path"])
        if request.method == "POST" or _has_wrong_key(request, error):
            tenant = request.state.get("tenant")
            tenant_id = "" if tenant is None else tenant.tenant_id
            self._metrics.count_refused(
                error.code, dialect=dialect.name, tenant=tenant_id, is_failed=error.is_of_cluster
            )
        request_id = request.state.get("request_id") or self._new_request_id()
        response = error_response(dialect, error, request_id)
        reservation: Reservation | None = request.state.get("reservation")
        if reservation is not None:
            reservation.record.reject(error)
            response.headers = {**reservation.headers, **response.headers}
        return response

    def _on_http_error(
        self, request: Request[Any, Any, Any], error: HTTPException
    ) -> Response[Any]:
        found = error_of_http(error)
        if isinstance(found, RouteNotFound):
            found = RouteNotFound(missing_route(request.scope["path"]))
        response = self._on_hearth_error(request, found)
        response.headers.update(error.headers or {})  # Allow
        return response

    def _on_other_error(self, request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
        log.error("request_failed", path=request.url.path, exc_info=error)
        return self._on_hearth_error(request, HearthError("internal error"))


def _has_wrong_key(request: Request[Any, Any, Any], error: HearthError) -> bool:
    """Whether a path for tenants rejected the key: keys can be guessed with any method."""
    return isinstance(error, AuthenticationFailed) and "request_id" in request.state
