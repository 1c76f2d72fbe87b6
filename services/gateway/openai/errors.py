"""Every refusal in OpenAI's envelope: {"error": {message, type, param, code}}."""

from __future__ import annotations

import math

import msgspec
from litestar import Response
from litestar.exceptions import HTTPException, ValidationException

from services.gateway.tenancy.errors import RateLimited
from shared.errors import HearthError, InvalidRequest, NoCapacity, Overloaded, PayloadTooLarge

DEFAULT_RETRY_AFTER_S = 1.0


class RouteNotFound(InvalidRequest):
    code = "not_found"
    http_status = 404


class MethodNotAllowed(InvalidRequest):
    code = "method_not_allowed"
    http_status = 405


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorBody


def envelope(error: HearthError) -> ErrorEnvelope:
    return ErrorEnvelope(ErrorBody(error.message, error.openai_type, error.param, error.code))


def error_headers(error: HearthError) -> dict[str, str]:
    """Retry-After wherever trying again makes sense, in whole seconds, rounded up; and limits."""
    headers = dict(error.headers) if isinstance(error, RateLimited) else {}
    retry_after_s = error.retry_after_s
    if retry_after_s is None and isinstance(error, (NoCapacity, Overloaded)):
        retry_after_s = DEFAULT_RETRY_AFTER_S
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    return headers


def error_response(error: HearthError, request_id: str) -> Response[ErrorEnvelope]:
    return Response(
        envelope(error),
        status_code=error.http_status,
        headers={"x-request-id": request_id, **error_headers(error)},
        media_type="application/json",
    )


def error_of_http(error: HTTPException) -> HearthError:
    """The web framework's own refusals, as ours."""
    if error.status_code == 404:
        return RouteNotFound("there is no such route")
    if error.status_code == 405:
        return MethodNotAllowed("this route does not take this method")
    if error.status_code == 413:
        return PayloadTooLarge("the request body is too large")
    if isinstance(error, ValidationException):  # all that it says of a body of no bytes
        return InvalidRequest("the body is empty: send a JSON object")
    if error.status_code < 500:
        return InvalidRequest(error.detail)
    return HearthError("internal error")
