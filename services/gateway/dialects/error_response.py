"""The response to a rejected request, in the envelope of its path's dialect."""

from __future__ import annotations

from typing import Any

import structlog
from litestar import Response

from services.gateway.dialects.dialect_table import dialect_of
from services.gateway.http.response import error_headers
from shared.errors import HearthError

log = structlog.get_logger(__name__)


def error_response(path: str, error: HearthError, request_id: str) -> Response[Any]:
    if error.public_message != error.message:
        log.error("request_failed", request_id=request_id, code=error.code, error=error.message)
    dialect = dialect_of(path)
    status, body = dialect.encode_error(error, request_id)
    headers = {**dict.fromkeys(dialect.request_id_headers, request_id), **error_headers(error)}
    return Response(body, status_code=status, headers=headers, media_type="application/json")
