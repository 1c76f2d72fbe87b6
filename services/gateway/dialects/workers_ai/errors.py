"""Encodes errors in Cloudflare's envelope: {"result": null, "success": false, "errors",
"messages"}.

The dialect has numbers instead of codes, and statuses of its own: an unknown model is a 400, a
timeout a 408, and no capacity a 429.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.gateway.dialects.workers_ai.model_id import MalformedModelId
from services.gateway.http.errors import MethodNotAllowed, RouteNotFound, shortened
from services.gateway.output.framing import Framing
from services.gateway.request.request_output import ClientDisconnected
from services.gateway.tenancy.errors import (
    LimitIsZero,
    ModelNotAllowed,
    NoRegionAllowed,
    PermissionDenied,
    RateLimited,
)
from shared.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    HearthError,
    InvalidRequest,
    NoCapacity,
    Overloaded,
    PayloadTooLarge,
    PromptTooLong,
    UnknownModel,
    WorkerBusy,
)

BUSY = "Capacity temporarily exceeded, please try again."


class MissingBody(InvalidRequest):
    code = "missing_body"


class LoraNotSupported(InvalidRequest):
    code = "lora_not_supported"
    http_status = 405


class Number(msgspec.Struct, frozen=True):
    """The number of an error in the envelope, and the HTTP status of its response."""

    code: int
    status: int


INTERNAL = 3043  # a failure of the server; the error has its own status
NUMBERS: dict[type[HearthError], Number] = {
    InvalidRequest: Number(5004, 400),
    MissingBody: Number(3003, 400),
    UnknownModel: Number(5007, 400),
    AuthenticationFailed: Number(10000, 401),
    PermissionDenied: Number(10000, 403),
    ModelNotAllowed: Number(5018, 403),
    LimitIsZero: Number(3023, 403),
    NoRegionAllowed: Number(3023, 403),
    MalformedModelId: Number(3042, 404),
    RouteNotFound: Number(7000, 404),
    LoraNotSupported: Number(5005, 405),
    MethodNotAllowed: Number(7001, 405),
    DeadlineExceeded: Number(3007, 408),
    ClientDisconnected: Number(3008, 408),
    PayloadTooLarge: Number(3006, 413),
    PromptTooLong: Number(3006, 413),
    RateLimited: Number(3036, 429),
    Overloaded: Number(3040, 429),
    NoCapacity: Number(3040, 429),
    WorkerBusy: Number(3040, 429),
}


class ErrorEntry(msgspec.Struct, frozen=True):
    code: int
    """The number of the error in Workers AI."""
    message: str
    """What is wrong, and what to do."""


class WorkersAIErrorEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    result: None = None
    """Always null."""
    success: bool = False
    """Always false."""
    errors: Sequence[ErrorEntry]
    """The error, in a list of one."""
    messages: Sequence[str] = ()
    """Always empty."""


def number_of(error: type[HearthError]) -> Number:
    """Returns the number of the error's class, or of its nearest superclass that has one."""
    for each in error.__mro__:
        if each in NUMBERS:
            return NUMBERS[each]
    return Number(INTERNAL, max(error.http_status, 500))


def envelope(error: HearthError) -> WorkersAIErrorEnvelope:
    return WorkersAIErrorEnvelope(
        errors=(ErrorEntry(number_of(type(error)).code, _message(error)),)
    )


def encode_error(error: HearthError, _: str) -> tuple[int, WorkersAIErrorEnvelope]:
    return number_of(type(error)).status, envelope(error)


class DialectErrors:
    """Implements what the encoders of this dialect share."""

    def __init__(self, framing: Framing) -> None:
        self.framing = framing

    def keep_alive(self) -> bytes:
        """Returns no bytes: only encoders of streamed responses override it."""
        return b""

    def closing(self) -> bytes:
        return self.framing.done

    def error_status(self, error: HearthError) -> int:
        return number_of(type(error)).status

    def error_body(self, error: HearthError) -> WorkersAIErrorEnvelope:
        return envelope(error)

    def error_event(self, error: HearthError) -> bytes:
        return self.framing.event(envelope(error))


def _message(error: HearthError) -> str:
    """Returns the message with the field's name, for which the envelope has no place."""
    message = error.public_message
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    if number_of(type(error)).code == 3040:
        message = f"{BUSY} ({message})"
    return shortened(message)
