"""The last requests of each tenant and of all, without their phases. No I/O.

Requests that no worker has seen have a list of their own: a client that repeats a wrong one must
not displace those that were served.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from shared.telemetry.timeline import Timeline

MAX_SERVED = 50
MAX_REJECTED = 10
MAX_TENANTS = 256


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An ended request."""

    request_id: str
    tenant_id: str
    model: str
    """The name of the model."""
    dialect: str = ""
    """The API through which it came."""
    status: int = 200
    """The HTTP status of its response."""
    outcome: str
    """A finish reason or an error code."""
    started_at: float
    """When it arrived, in seconds since 1970."""
    duration_s: float
    """Seconds from its arrival to its end."""
    num_prompt_tokens: int = 0
    """Tokens of the prompt."""
    num_output_tokens: int = 0
    """Tokens of the output."""
    num_resubmissions: int = 0
    """How often it went on at another worker."""


_FIELDS = RequestSummary.__struct_fields__


@dataclass(slots=True)
class _Last:
    served: deque[RequestSummary] = field(default_factory=lambda: deque(maxlen=MAX_SERVED))
    rejected: deque[RequestSummary] = field(default_factory=lambda: deque(maxlen=MAX_REJECTED))

    def add(self, summary: RequestSummary, *, is_served: bool) -> None:
        (self.served if is_served else self.rejected).append(summary)


class RecentRequests:
    """The last MAX_SERVED and MAX_REJECTED requests of all, and of each of the MAX_TENANTS tenants
    that sent the last ones.
    """

    def __init__(self) -> None:
        self._all = _Last()
        self._by_tenant: dict[str, _Last] = {}

    def add(self, timeline: Timeline) -> None:
        summary = RequestSummary(**{name: getattr(timeline, name) for name in _FIELDS})
        own = self._by_tenant.pop(summary.tenant_id, None) or _Last()
        self._by_tenant[summary.tenant_id] = own
        if len(self._by_tenant) > MAX_TENANTS:
            del self._by_tenant[next(iter(self._by_tenant))]
        for each in (self._all, own):
            each.add(summary, is_served=bool(timeline.tries))

    def of(self, tenant_id: str | None) -> list[RequestSummary]:
        """Returns the requests of a tenant, or of all if it is None, the latest first."""
        found = self._all if tenant_id is None else self._by_tenant.get(tenant_id, _Last())
        return sorted(
            (*found.served, *found.rejected), key=lambda each: each.started_at, reverse=True
        )
