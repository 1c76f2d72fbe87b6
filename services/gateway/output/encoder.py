"""The interface that each dialect implements for writing responses over HTTP or NATS."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from services.gateway.output.events import Event
from services.gateway.output.results import Results
from shared.errors import HearthError


class Encoder(Protocol):
    """Writes one response in a dialect."""

    def keep_alive(self) -> bytes:
        """Returns an event of the dialect without content, for a silent stream: the timeouts of
        clients ignore comments.
        """
        ...

    def events(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Yields framed events in parts; an event that the dialect does not show is empty."""
        ...

    def closing(self) -> bytes:
        """Returns the bytes after the last event."""
        ...

    def body(self, results: Results) -> Iterator[bytes]:
        """Yields the complete encoded response in parts. The first ones are empty, while it is
        computed. Raises HearthError, before the first other part, if it cannot be built.
        """
        ...

    def error_status(self, error: HearthError) -> int:
        """Returns the HTTP status of the error response."""
        ...

    def error_body(self, error: HearthError) -> Any:
        """Returns the error response as an object for the JSON encoder."""
        ...

    def error_event(self, error: HearthError) -> bytes:
        """Returns the last event of a failed stream."""
        ...
