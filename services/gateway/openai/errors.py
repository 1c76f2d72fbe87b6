"""Every error in OpenAI's envelope: {"error": {message, type, param, code}}."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from litestar import Response
from litestar.exceptions import HTTPException, ValidationException

from services.gateway.http.response import error_headers
from services.gateway.output.events import Event
from services.gateway.request.endpoint import ResponseContext
from shared.errors import HearthError, InvalidRequest, PayloadTooLarge

MAX_MESSAGE_CHARS = 500  # a message may repeat what the client sent


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
    message = error.message
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[: MAX_MESSAGE_CHARS - 1] + "…"
    return ErrorEnvelope(ErrorBody(message, error.openai_type, error.param, error.code))


@dataclass(frozen=True, slots=True)
class OpenAIEncoder:
    """The common part of all OpenAI responses."""

    context: ResponseContext

    @property
    def keep_alive(self) -> bytes:
        return self.context.framing.keep_alive

    def events(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Returns no bytes; for responses that are never streamed."""
        return iter(())

    def closing(self) -> bytes:
        return self.context.framing.done

    def error_body(self, error: HearthError) -> ErrorEnvelope:
        return envelope(error)

    def error_event(self, error: HearthError) -> bytes:
        return self.context.framing.event(envelope(error))


def error_response(error: HearthError, request_id: str) -> Response[ErrorEnvelope]:
    return Response(
        envelope(error),
        status_code=error.http_status,
        headers={"x-request-id": request_id, **error_headers(error)},
        media_type="application/json",
    )


def error_of_http(error: HTTPException) -> HearthError:
    """Converts an error of the web framework to a HearthError."""
    if error.status_code == 404:
        return RouteNotFound("there is no such route")
    if error.status_code == 405:
        return MethodNotAllowed("this route does not take this method")
    if error.status_code == 413:
        return PayloadTooLarge("the request body is too large")
    if isinstance(error, ValidationException):  # raised for a body of zero bytes
        return InvalidRequest("the body is empty: send a JSON object")
    if error.status_code < 500:
        return InvalidRequest(error.detail)
    return HearthError("internal error")
