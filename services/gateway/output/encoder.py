"""The interface of a dialect to what writes responses, over HTTP or NATS."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from services.gateway.output.events import Event
from services.gateway.output.results import Results
from shared.errors import HearthError


class Encoder(Protocol):
    """One instance writes one response."""

    def keep_alive(self) -> bytes:
        """Returns an event of the dialect that says nothing, for a silent stream: the timers of
        clients do not count comments.
        """
        ...

    def events(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Returns framed events in parts; an event that the dialect does not show is empty."""
        ...

    def closing(self) -> bytes:
        """Returns what follows the last event."""
        ...

    def body(self, results: Results) -> Iterator[bytes]:
        """Returns the complete encoded response in parts. Empty ones come first, while it is
        computed. Raises HearthError, before the first other part, if it cannot be built.
        """
        ...

    def error_status(self, error: HearthError) -> int:
        """Returns the HTTP status of the error response."""
        ...

    def error_body(self, error: HearthError) -> Any:
        """Returns the error response for the JSON encoder."""
        ...

    def error_event(self, error: HearthError) -> bytes:
        """Returns the last event of a failed stream."""
        ...
