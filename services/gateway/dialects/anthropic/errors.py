"""Encodes errors in Anthropic's envelope: {"type": "error", "error": {type, message},
"request_id"}.

The dialect has statuses of its own: a prompt that exceeds the context is a 400 with a message that
clients parse, and full queues are a 529.
"""

from __future__ import annotations

import re

import msgspec

from services.gateway.http.errors import UnsupportedMediaType, shortened
from services.gateway.request.request_output import ClientDisconnected
from services.gateway.tenancy.errors import PermissionDenied, RateLimited
from shared.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    HearthError,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    PromptTooLong,
    UnknownModel,
    WorkerBusy,
)

# The numbers in the messages of PromptTooLong, which also come from other processes.
_LENGTH = re.compile(
    r"context length is (?P<most>\d+) tokens, but the prompt has (?:at least )?(?P<tokens>\d+)"
)


class ErrorType(msgspec.Struct, frozen=True):
    """The type of an error in the envelope, and the HTTP status of its response."""

    name: str
    status: int


TYPES: dict[type[HearthError], ErrorType] = {
    InvalidRequest: ErrorType("invalid_request_error", 400),
    PromptTooLong: ErrorType("invalid_request_error", 400),
    AuthenticationFailed: ErrorType("authentication_error", 401),
    PermissionDenied: ErrorType("permission_error", 403),
    UnknownModel: ErrorType("not_found_error", 404),
    PayloadTooLarge: ErrorType("request_too_large", 413),
    UnsupportedMediaType: ErrorType("invalid_request_error", 415),
    RateLimited: ErrorType("rate_limit_error", 429),
    ClientDisconnected: ErrorType("api_error", 499),
    DeadlineExceeded: ErrorType("timeout_error", 504),
    Overloaded: ErrorType("overloaded_error", 529),
    WorkerBusy: ErrorType("overloaded_error", 529),
}


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    type: str
    """The kind of the error, as Anthropic names it."""
    message: str
    """What is wrong, and what to do."""


class AnthropicErrorEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "error"
    """Always `error`."""
    error: AnthropicErrorBody
    """The error."""
    request_id: str


def type_of(error: HearthError) -> ErrorType:
    """Returns the type of the error's class, or of its nearest superclass that has one."""
    if error.http_status == 404:  # the web framework's error, too
        return TYPES[UnknownModel]
    for each in type(error).__mro__:
        if each in TYPES:
            found = TYPES[each]
            is_own_status = each is InvalidRequest and error.http_status != 400
            return ErrorType(found.name, error.http_status) if is_own_status else found
    return ErrorType("api_error", max(error.http_status, 500))


def envelope(error: HearthError, request_id: str) -> AnthropicErrorEnvelope:
    body = AnthropicErrorBody(type_of(error).name, shortened(_message(error)))
    return AnthropicErrorEnvelope(error=body, request_id=request_id)


def encode_error(error: HearthError, request_id: str) -> tuple[int, AnthropicErrorEnvelope]:
    return type_of(error).status, envelope(error, request_id)


def _message(error: HearthError) -> str:
    """Returns the message with the field's name, for which the envelope has no place."""
    message = error.public_message
    if isinstance(error, PromptTooLong):
        return _too_long(message)
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    return message


def _too_long(message: str) -> str:
    """Writes the message as Anthropic does: Claude Code reads the numbers and compacts the
    conversation.
    """
    found = _LENGTH.search(message)
    if found is None:
        return f"prompt is too long: {message}"
    num_tokens, context = int(found["tokens"]), int(found["most"])
    most = context if num_tokens > context else num_tokens - 1  # an answer has one token at least
    return f"prompt is too long: {num_tokens} tokens > {most} maximum"
