"""What the response writer needs of an HTTP dialect; one instance writes one response."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from services.gateway.request.request_output import OutputDelta
from services.gateway.text.scored_tokens import ScoredToken
from shared.errors import HearthError


@dataclass(slots=True)
class ChoiceResult:
    """All output of one choice."""

    index: int
    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    finish_reason: str = ""


class Dialect(Protocol):
    def event(self, delta: OutputDelta) -> bytes:
        """Server-sent events; empty for what the dialect does not show."""
        ...

    def closing(self) -> bytes:
        """The events after the last delta."""
        ...

    def body(self, results: list[ChoiceResult]) -> Any:
        """The response in one piece, for the JSON encoder; `results` by index. Raises HearthError
        if it cannot be given.
        """
        ...

    def error_body(self, error: HearthError) -> Any:
        """For the JSON encoder."""
        ...

    def error_event(self, error: HearthError) -> bytes:
        """The last event of a stream that fails."""
        ...
