"""Counts of one endpoint's requests, of all clients together."""

from __future__ import annotations

from shared.errors import HearthError


class EndpointCounts:
    """`last_error`: status and code. Not the message, which may repeat what another client sent."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_errors = 0
        self.last_error = ""
        self.processing_ns = 0

    @property
    def average_ns(self) -> int:
        return self.processing_ns // self.num_requests if self.num_requests else 0

    def ended(self, duration_s: float, error: HearthError | None = None) -> None:
        """`duration_s`: from the arrival of the request to the last reply."""
        self.processing_ns += round(duration_s * 1e9)
        if error is not None:
            self.num_errors += 1
            self.last_error = f"{error.http_status} {error.code}"
