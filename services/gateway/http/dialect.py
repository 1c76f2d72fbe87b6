"""The interface of HTTP dialects to the response writer; one instance writes one response."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.gateway.request.request_output import OutputDelta
from services.gateway.text.scored_tokens import ScoredTokens
from shared.errors import HearthError


@dataclass(slots=True)
class ChoiceResult:
    """All output of one choice."""

    index: int
    text: str = ""
    tokens: ScoredTokens = field(default_factory=ScoredTokens)
    finish_reason: str = ""


class Dialect(Protocol):
    def event(self, delta: OutputDelta) -> bytes:
        """Returns server-sent events; empty for a delta that the dialect does not show."""
        ...

    def closing(self) -> bytes:
        """Returns the events after the last delta."""
        ...

    def body(self, results: list[ChoiceResult]) -> Iterator[bytes]:
        """Returns the complete encoded response in parts; `results` sorted by index. Raises
        HearthError, before the first part, if the response cannot be built.
        """
        ...

    def error_body(self, error: HearthError) -> Any:
        """Returns the error response for the JSON encoder."""
        ...

    def error_event(self, error: HearthError) -> bytes:
        """Returns the last event of a failed stream."""
        ...
