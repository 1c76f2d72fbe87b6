"""Converts errors of the web framework to HearthErrors, and bounds every error's message."""

from __future__ import annotations

from litestar.exceptions import HTTPException, ValidationException

from shared.errors import HearthError, InvalidRequest, PayloadTooLarge

MAX_MESSAGE_CHARS = 500  # a message may repeat the client's text


class RouteNotFound(InvalidRequest):
    code = "not_found"
    http_status = 404


class MethodNotAllowed(InvalidRequest):
    code = "method_not_allowed"
    http_status = 405


class UnsupportedMediaType(InvalidRequest):
    code = "unsupported_media_type"
    http_status = 415


def error_of_http(error: HTTPException) -> HearthError:
    if error.status_code == 404:
        return RouteNotFound("there is no such route")
    if error.status_code == 405:
        return MethodNotAllowed("this route does not take this method")
    if error.status_code == 413:
        return PayloadTooLarge("the request body is too large")
    if isinstance(error, ValidationException):  # raised for an empty body
        return InvalidRequest("the body is empty: send a JSON object")
    if error.status_code < 500:
        return InvalidRequest(error.detail)
    return HearthError("internal error")


def shortened(message: str) -> str:
    """Returns an error's message as the clients of every dialect see it."""
    if len(message) > MAX_MESSAGE_CHARS:
        return message[: MAX_MESSAGE_CHARS - 1] + "…"
    return message
