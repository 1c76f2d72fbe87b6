"""Encodes errors in OpenAI's envelope: {"error": {message, type, param, code}}."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from services.gateway.http.errors import shortened
from services.gateway.output.events import Event
from services.gateway.request.endpoint import ResponseContext
from shared.errors import HearthError


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    """What is wrong, and what to do."""
    type: str
    """The kind of the error, as OpenAI names it."""
    param: str | None
    """The field of the request that is wrong, if it is one."""
    code: str | None
    """The exact error, for programs."""


class ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorBody
    """The error."""


def envelope(error: HearthError) -> ErrorEnvelope:
    message = shortened(error.public_message)
    return ErrorEnvelope(ErrorBody(message, error.openai_type, error.param, error.code))


def encode_error(error: HearthError, _: str) -> tuple[int, ErrorEnvelope]:
    return error.http_status, envelope(error)


@dataclass(frozen=True, slots=True)
class OpenAIEncoder:
    """Implements what the encoders of all OpenAI responses share."""

    context: ResponseContext

    def keep_alive(self) -> bytes:
        """Returns no bytes: only encoders of streamed responses override it."""
        return b""

    def events(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Returns no bytes: only encoders of streamed responses override it."""
        return iter(())

    def closing(self) -> bytes:
        return self.context.framing.done

    def error_status(self, error: HearthError) -> int:
        return error.http_status

    def error_body(self, error: HearthError) -> ErrorEnvelope:
        return envelope(error)

    def error_event(self, error: HearthError) -> bytes:
        return self.context.framing.event(envelope(error))
