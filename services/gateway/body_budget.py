"""Bounds the body bytes that a gateway holds for requests which are not submitted yet."""

from __future__ import annotations

from collections import Counter

from shared.errors import Overloaded

MIB = 1 << 20
MAX_TENANT_BYTES = 64 * MIB
MAX_GATEWAY_BYTES = 512 * MIB


class BodyBudget:
    def __init__(
        self, max_tenant_bytes: int = MAX_TENANT_BYTES, max_gateway_bytes: int = MAX_GATEWAY_BYTES
    ) -> None:
        self._max_tenant_bytes = max_tenant_bytes
        self._max_gateway_bytes = max_gateway_bytes
        self._by_tenant: Counter[str] = Counter()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def body(self, tenant_id: str) -> BodyBytes:
        return BodyBytes(self, tenant_id)

    def add(self, tenant_id: str, num_bytes: int) -> None:
        """Counts bytes of a tenant. Beyond the tenant's or the gateway's limit, adds nothing and
        raises Overloaded.
        """
        if self._by_tenant[tenant_id] + num_bytes > self._max_tenant_bytes:
            raise Overloaded("this tenant's requests hold too many body bytes", retry_after_s=1.0)
        if self._num_bytes + num_bytes > self._max_gateway_bytes:
            raise Overloaded("the gateway holds too many body bytes", retry_after_s=1.0)
        self._by_tenant[tenant_id] += num_bytes
        self._num_bytes += num_bytes

    def remove(self, tenant_id: str, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        self._by_tenant[tenant_id] -= num_bytes
        if not self._by_tenant[tenant_id]:
            del self._by_tenant[tenant_id]


class BodyBytes:
    """Counts the bytes of one body until `release`."""

    def __init__(self, budget: BodyBudget, tenant_id: str) -> None:
        self._budget = budget
        self._tenant_id = tenant_id
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Raises Overloaded, and counts nothing, beyond a limit."""
        self._budget.add(self._tenant_id, num_bytes)
        self._num_bytes += num_bytes

    def release(self) -> None:
        """Ends the counting. Idempotent."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        self._budget.remove(self._tenant_id, num_bytes)
