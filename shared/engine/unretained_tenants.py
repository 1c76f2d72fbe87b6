"""The tenants whose requests have zero retention on a worker for a while, whatever they say.

A request may have been sent before its tenant got zero retention, and be placed later: for a time
after a removal all requests of the tenant have zero retention here.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from shared.clock import Clock
from shared.messages import DropTenantKv, EncodeImage, Request, RunPrefill

MAX_UNRETAINED = 10_000  # tenants

AnyRequest = TypeVar("AnyRequest", Request, RunPrefill, EncodeImage)


class UnretainedTenants:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}  # by tenant, by the worker's clock

    def add(self, command: DropTenantKv) -> None:
        until = self._clock.now() + command.unretained_s
        for tenant_id in command.tenant_ids:
            self._until.pop(tenant_id, None)
            self._until[tenant_id] = until
        for tenant_id in list(self._until)[:-MAX_UNRETAINED]:
            del self._until[tenant_id]

    def current(self, request: AnyRequest) -> AnyRequest:
        """Returns the request with the retention that its tenant has now."""
        if request.is_zero_retention or request.tenant_id not in self:
            return request
        return msgspec.structs.replace(request, is_zero_retention=True)

    def __contains__(self, tenant_id: object) -> bool:
        until = self._until.get(tenant_id, 0.0) if isinstance(tenant_id, str) else 0.0
        return until > self._clock.now()
