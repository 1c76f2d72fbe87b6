"""How many requests of one tenant are decoded, rendered and tokenized at the same time.

waiting in the tenant's own queue ──a slot is free──▶ in preparation ──▶ released
   └──queue full, or `max_wait_s`: Overloaded, for this tenant alone
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from shared.errors import Overloaded

MAX_WAITING = 512  # of one tenant
MAX_WAIT_S = 5.0


@dataclass(slots=True)
class _Tenant:
    num_taken: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class PreparationSlots:
    def __init__(
        self, per_tenant: int, *, max_waiting: int = MAX_WAITING, max_wait_s: float = MAX_WAIT_S
    ) -> None:
        self._per_tenant = per_tenant
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._tenants: dict[str, _Tenant] = {}

    @asynccontextmanager
    async def slot(self, tenant_id: str) -> AsyncIterator[None]:
        """Holds one slot of the tenant, first come first served. Raises Overloaded."""
        tenant = self._tenants.setdefault(tenant_id, _Tenant())
        if tenant.num_taken < self._per_tenant:
            tenant.num_taken += 1
        else:
            await self._wait(tenant_id, tenant)
        try:
            yield
        finally:
            self._release(tenant_id, tenant)

    async def _wait(self, tenant_id: str, tenant: _Tenant) -> None:
        """Returns when a slot was passed on to this caller."""
        if len(tenant.waiting) >= self._max_waiting:
            raise _too_many()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tenant.waiting.append(turn)
        try:
            async with asyncio.timeout(self._max_wait_s):
                await turn
        except BaseException as error:
            if turn in tenant.waiting:
                tenant.waiting.remove(turn)
            elif not turn.cancelled():
                self._release(tenant_id, tenant)  # the slot came at the same moment
            if isinstance(error, TimeoutError):
                raise _too_many() from None
            raise

    def _release(self, tenant_id: str, tenant: _Tenant) -> None:
        self._pass_on(tenant)
        if not tenant.num_taken:
            self._tenants.pop(tenant_id, None)

    def _pass_on(self, tenant: _Tenant) -> None:
        """Skips those that stopped waiting."""
        while tenant.waiting:
            turn = tenant.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        tenant.num_taken -= 1


def _too_many() -> Overloaded:
    return Overloaded("this tenant has too many requests in preparation", retry_after_s=1.0)
