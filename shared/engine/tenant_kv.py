"""The KV of one tenant on one worker: how much there is, and its removal.

A request may have been sent before its tenant got zero retention, and be placed later: for a time
after a removal all requests of the tenant have zero retention here.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from shared.clock import Clock
from shared.engine.engine import Engine
from shared.engine.pinned_prefixes import PinnedPrefixes
from shared.messages import (
    CountTenantKv,
    DropTenantKv,
    Request,
    RunPrefill,
    TenantKvCounted,
    TenantKvDropped,
)

MAX_UNRETAINED = 10_000  # tenants

AnyRequest = TypeVar("AnyRequest", Request, RunPrefill)


class TenantKv:
    def __init__(self, engine: Engine, pins: PinnedPrefixes, clock: Clock) -> None:
        self._engine = engine
        self._pins = pins
        self._clock = clock
        self._unretained: dict[str, float] = {}  # tenant → time by the worker's clock

    def drop(self, command: DropTenantKv) -> TenantKvDropped:
        """Makes the KV of tenants unfindable. What running requests hold goes with their end."""
        until = self._clock.now() + command.unretained_s
        num_blocks = 0
        for tenant_id in command.tenant_ids:
            self._pins.drop(tenant_id)
            num_blocks += self._engine.drop_tenant(tenant_id)
            self._unretained.pop(tenant_id, None)
            self._unretained[tenant_id] = until
        for tenant_id in list(self._unretained)[:-MAX_UNRETAINED]:
            del self._unretained[tenant_id]
        busy = [each for each in command.tenant_ids if self._engine.num_held_blocks_of(each)]
        return TenantKvDropped(num_blocks=num_blocks, busy_tenant_ids=tuple(busy))

    def count(self, command: CountTenantKv) -> TenantKvCounted:
        pool, tenant_id = self._engine.pool, command.tenant_id
        longest, size = self._engine.batcher.needs.longest, pool.block_size
        return TenantKvCounted(
            num_cached_tokens=longest(pool.num_blocks_of(tenant_id)) * size,
            num_held_tokens=longest(self._engine.num_held_blocks_of(tenant_id)) * size,
        )

    def current(self, request: AnyRequest) -> AnyRequest:
        """Returns the request with the retention that its tenant has now."""
        if request.is_zero_retention or not self._unretained:
            return request
        if self._unretained.get(request.tenant_id, 0.0) <= self._clock.now():
            return request
        return msgspec.structs.replace(request, is_zero_retention=True)
