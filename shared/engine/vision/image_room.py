"""Bounds the images whose pixels are in memory, of all tenants and of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class _OfTenant:
    places: asyncio.Semaphore
    num_users: int = 0  # that hold a place or wait for one


class ImageRoom:
    """At most `total` images, and `per_tenant` of one tenant. A tenant with many images waits for
    its own, and leaves the other places to other tenants.
    """

    def __init__(self, total: int, per_tenant: int) -> None:
        self._places = asyncio.Semaphore(total)
        self._per_tenant = per_tenant
        self._of_tenant: dict[str, _OfTenant] = {}

    @asynccontextmanager
    async def place(self, tenant_id: str) -> AsyncIterator[None]:
        own = self._of_tenant.get(tenant_id)
        if own is None:
            own = self._of_tenant[tenant_id] = _OfTenant(asyncio.Semaphore(self._per_tenant))
        own.num_users += 1
        try:
            async with own.places, self._places:
                yield
        finally:
            own.num_users -= 1
            if not own.num_users:
                del self._of_tenant[tenant_id]
