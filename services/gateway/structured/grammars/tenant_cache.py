"""A cache by tenant and digest, bounded in entries and bytes, that evicts the least recently used.

Tenants do not share values: a fast answer would reveal what another tenant has sent.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class Bounds(NamedTuple):
    entries: int
    num_bytes: int


class _CachedValue(NamedTuple, Generic[Value]):
    value: Value
    num_bytes: int


class _CacheOfTenant(Generic[Value]):
    def __init__(self) -> None:
        self.entries: dict[bytes, _CachedValue[Value]] = {}  # least recently used first
        self.num_bytes = 0

    def put(self, key: bytes, entry: _CachedValue[Value]) -> None:
        self.remove(key)
        self.entries[key] = entry
        self.num_bytes += entry.num_bytes

    def remove(self, key: bytes) -> None:
        found = self.entries.pop(key, None)
        self.num_bytes -= 0 if found is None else found.num_bytes


class TenantCache(Generic[Value]):
    def __init__(self, bounds: Bounds, *, of_tenant: Bounds) -> None:
        """`bounds` limit all values, and `of_tenant` those of each tenant, so that no tenant evicts
        those of all others.
        """
        self._bounds = bounds
        self._of_tenant = of_tenant
        self._tenants: dict[str, _CacheOfTenant[Value]] = {}  # least recently used first

    def get(self, tenant_id: str, key: bytes) -> Value | None:
        tenant = self._tenants.get(tenant_id)
        found = None if tenant is None else tenant.entries.get(key)
        if tenant is None or found is None:
            return None
        tenant.put(key, found)
        self._tenants[tenant_id] = self._tenants.pop(tenant_id)
        return found.value

    def put(self, tenant_id: str, key: bytes, value: Value, num_bytes: int) -> None:
        """Stores a value, unless it is larger than the tenant's bound."""
        if num_bytes > self._of_tenant.num_bytes:
            return
        tenant = self._tenants[tenant_id] = self._tenants.pop(tenant_id, _CacheOfTenant())
        tenant.put(key, _CachedValue(value, num_bytes))
        while _exceeds(self._of_tenant, len(tenant.entries), tenant.num_bytes):
            tenant.remove(next(iter(tenant.entries)))
        while _exceeds(self._bounds, *self._totals()):
            self._drop(next(iter(self._tenants)))

    def remove_tenant(self, tenant_id: str) -> None:
        self._tenants.pop(tenant_id, None)

    def _totals(self) -> tuple[int, int]:
        tenants = self._tenants.values()
        return sum(len(each.entries) for each in tenants), sum(each.num_bytes for each in tenants)

    def _drop(self, tenant_id: str) -> None:
        """Removes the least recently used value of the tenant."""
        tenant = self._tenants[tenant_id]
        tenant.remove(next(iter(tenant.entries)))
        if not tenant.entries:
            del self._tenants[tenant_id]


def _exceeds(bounds: Bounds, num_entries: int, num_bytes: int) -> bool:
    return num_entries > bounds.entries or num_bytes > bounds.num_bytes
