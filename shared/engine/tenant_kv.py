"""The KV of one tenant on one worker: how much there is, and its removal."""

from __future__ import annotations

from shared.clock import Clock
from shared.engine.engine import Engine
from shared.engine.pinned_prefixes import PinnedPrefixes
from shared.engine.unretained_tenants import UnretainedTenants
from shared.messages import CountTenantKv, DropTenantKv, TenantKvCounted, TenantKvDropped


class TenantKv:
    def __init__(self, engine: Engine, pins: PinnedPrefixes, clock: Clock) -> None:
        self._engine = engine
        self._pins = pins
        self.unretained = UnretainedTenants(clock)

    def drop(self, command: DropTenantKv) -> TenantKvDropped:
        """Makes the KV of tenants unfindable. What running requests hold goes with their end."""
        self.unretained.add(command)
        tenant_ids = frozenset(command.tenant_ids)  # of a day's orders: sequences are read once
        self._pins.drop(tenant_ids)
        num_blocks = self._engine.drop_tenants(tenant_ids)
        busy = self._engine.tenants_with_held_blocks & tenant_ids
        return TenantKvDropped(num_blocks=num_blocks, busy_tenant_ids=tuple(sorted(busy)))

    def count(self, command: CountTenantKv) -> TenantKvCounted:
        pool, tenant_id = self._engine.pool, command.tenant_id
        longest, size = self._engine.batcher.needs.longest, pool.block_size
        return TenantKvCounted(
            num_cached_tokens=longest(pool.num_blocks_of(tenant_id)) * size,
            num_held_tokens=longest(self._engine.num_held_blocks_of(tenant_id)) * size,
        )
