"""Receipts in the memory of one gateway, not yet signed. No I/O.

    added ──ttl──▶ removed; also when the store is full, of the tenant that holds most, the oldest,
                   and when one that may be read once has been read

No restart and no other process has them: nothing of a receipt is written anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

ENTRY_BYTES = 512  # of an entry besides its payload
FREED_SHARE = 64  # of the bound is removed at once, so that the search for a tenant is rare


@dataclass(frozen=True, slots=True)
class StoredReceipt:
    tenant_id: str
    payload: bytes
    salt: bytes
    expires_at: float

    @property
    def num_bytes(self) -> int:
        return len(self.payload) + ENTRY_BYTES


@dataclass(slots=True)
class _TenantReceipts:
    request_ids: dict[str, None]  # the oldest first
    num_bytes: int = 0


class ReceiptStore:
    """Times are seconds of the gateway's monotonic clock. If `is_read_once`, a receipt is removed
    when it is read.
    """

    def __init__(self, ttl_s: float, max_bytes: int, *, is_read_once: bool = False) -> None:
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._is_read_once = is_read_once
        self._receipts: dict[str, StoredReceipt] = {}  # the oldest first
        self._tenants: dict[str, _TenantReceipts] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._receipts)

    def add(self, tenant_id: str, request_id: str, payload: bytes, salt: bytes, now: float) -> None:
        """Stores a receipt. One that is larger than the store is dropped."""
        self.expire(now)
        self._remove(request_id)
        receipt = StoredReceipt(tenant_id, payload, salt, now + self._ttl_s)
        if receipt.num_bytes > self._max_bytes:
            return
        if self.num_bytes + receipt.num_bytes > self._max_bytes:
            self._free(receipt.num_bytes + self._max_bytes // FREED_SHARE)
        own = self._tenants.setdefault(tenant_id, _TenantReceipts({}))
        own.request_ids[request_id] = None
        own.num_bytes += receipt.num_bytes
        self.num_bytes += receipt.num_bytes
        self._receipts[request_id] = receipt

    def read(self, tenant_id: str, request_id: str, now: float) -> StoredReceipt | None:
        """Returns None for a receipt that is not here, or is of another tenant."""
        self.expire(now)
        found = self._receipts.get(request_id)
        if found is None or found.tenant_id != tenant_id:
            return None
        if self._is_read_once:
            self._remove(request_id)
        return found

    def expire(self, now: float) -> None:
        while self._receipts:
            oldest = next(iter(self._receipts))
            if self._receipts[oldest].expires_at > now:
                return
            self._remove(oldest)

    def remove_tenant(self, tenant_id: str) -> int:
        """Returns how many were removed."""
        own = self._tenants.get(tenant_id)
        request_ids = () if own is None else tuple(own.request_ids)
        for each in request_ids:
            self._remove(each)
        return len(request_ids)

    def _free(self, num_bytes: int) -> None:
        """Removes the oldest receipts of the largest tenants until as many bytes are free."""
        while self._receipts and self._max_bytes - self.num_bytes < num_bytes:
            largest = max(self._tenants.values(), key=lambda each: each.num_bytes)
            rest = max(0, largest.num_bytes - self._max_bytes // FREED_SHARE)
            while largest.request_ids and largest.num_bytes > rest:
                self._remove(next(iter(largest.request_ids)))

    def _remove(self, request_id: str) -> None:
        receipt = self._receipts.pop(request_id, None)
        if receipt is None:
            return
        own = self._tenants[receipt.tenant_id]
        del own.request_ids[request_id]
        own.num_bytes -= receipt.num_bytes
        self.num_bytes -= receipt.num_bytes
        if not own.request_ids:
            del self._tenants[receipt.tenant_id]
