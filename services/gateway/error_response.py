"""The response to a rejected request, in the envelope of its path's dialect."""

from __future__ import annotations

from typing import Any

import structlog
from litestar import Response

from services.gateway.anthropic.errors import envelope as anthropic_envelope
from services.gateway.anthropic.errors import type_of
from services.gateway.anthropic.routes import REQUEST_ID
from services.gateway.dialects import dialect_of
from services.gateway.http.response import error_headers
from services.gateway.openai.errors import envelope
from services.gateway.workers_ai.errors import envelope as workers_ai_envelope
from services.gateway.workers_ai.errors import number_of
from shared.errors import HearthError

log = structlog.get_logger(__name__)


def error_response(path: str, error: HearthError, request_id: str) -> Response[Any]:
    if error.public_message != error.message:
        log.error("request_failed", request_id=request_id, code=error.code, error=error.message)
    headers = {"x-request-id": request_id, **error_headers(error)}
    body: Any
    match dialect_of(path):
        case "anthropic":
            body, status = anthropic_envelope(error, request_id), type_of(error).status
            headers[REQUEST_ID] = request_id
        case "workers_ai":
            body, status = workers_ai_envelope(error), number_of(type(error)).status
        case "openai":
            body, status = envelope(error), error.http_status
    return Response(body, status_code=status, headers=headers, media_type="application/json")
