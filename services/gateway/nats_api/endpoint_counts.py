"""The counts of one endpoint's requests, over all clients."""

from __future__ import annotations

from shared.errors import HearthError


class EndpointCounts:
    """The counts of one endpoint. `last_error` is a status and code, without the message, which may
    contain another client's text.
    """

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_errors = 0
        self.last_error = ""
        self.processing_ns = 0

    @property
    def average_ns(self) -> int:
        return self.processing_ns // self.num_requests if self.num_requests else 0

    def ended(self, duration_s: float, error: HearthError | None = None) -> None:
        """Adds an ended request. `duration_s` is the time from its arrival to the last reply."""
        self.processing_ns += round(duration_s * 1e9)
        if error is not None:
            self.num_errors += 1
            self.last_error = f"{error.http_status} {error.code}"
