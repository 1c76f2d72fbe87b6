"""How many requests the gateway has room for, and how many of one tenant are decoded, rendered and
tokenized at the same time.

waiting in the tenant's own queue ──a slot is free──▶ in preparation ──▶ released
   └──queue full, or `max_wait_s`: Overloaded, for this tenant alone

A tenant has more slots while no other one prepares anything: each slot is work that the event loop
does between two steps of another tenant's request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from math import inf

from shared.clock import Clock
from shared.errors import NoCapacity, Overloaded

ALONE_AFTER_S = 1.0  # seconds without a request of another tenant


class RequestCapacity:
    """Bounds the requests of the gateway. `max_requests`: open or in preparation at the same time.
    `num_open`: returns the number of open ones.
    """

    def __init__(self, max_requests: int, num_open: Callable[[], int]) -> None:
        self._max_requests = max_requests
        self._num_open = num_open
        self._num_preparing = 0
        self.is_draining = False

    @property
    def num_free(self) -> int:
        return self._max_requests - self._num_open() - self._num_preparing

    @contextmanager
    def preparing(self, num_requests: int = 1) -> Iterator[None]:
        self._num_preparing += num_requests
        try:
            yield
        finally:
            self._num_preparing -= num_requests

    def check(self) -> None:
        """Raises NoCapacity if the gateway is draining, and Overloaded if it is full."""
        self.check_draining()
        if self.num_free <= 0:
            raise Overloaded("too many requests are open at this gateway", retry_after_s=1.0)

    def check_draining(self) -> None:
        if self.is_draining:
            raise NoCapacity("the gateway is draining", retry_after_s=1.0)


@dataclass(slots=True)
class _TenantSlots:
    num_taken: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class RecentTenants:
    """Knows whether a tenant is the only one with requests. All slots of a gateway share it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last, self._last_at = "", -inf
        self._other_at = -inf  # time of the last request of another tenant

    def arrived(self, tenant_id: str) -> None:
        if tenant_id != self._last:
            self._last, self._other_at = tenant_id, self._last_at
        self._last_at = self._clock.now()

    def is_alone(self, tenant_id: str) -> bool:
        other_at = self._other_at if tenant_id == self._last else self._last_at
        return self._clock.now() - other_at >= ALONE_AFTER_S


class PreparationSlots:
    """`per_tenant`: the slots of a tenant; `alone`: those of a tenant while no other has requests
    (default: the same). `max_waiting`: the requests of a tenant that may wait.
    """

    def __init__(
        self,
        per_tenant: int,
        recent: RecentTenants,
        *,
        max_waiting: int,
        max_wait_s: float,
        alone: int | None = None,
    ) -> None:
        self._per_tenant = per_tenant
        self._alone = per_tenant if alone is None else alone
        self._recent = recent
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._tenants: dict[str, _TenantSlots] = {}

    @asynccontextmanager
    async def slot(self, tenant_id: str) -> AsyncIterator[None]:
        """Holds one slot of the tenant, first come first served. Raises Overloaded."""
        self._recent.arrived(tenant_id)
        tenant = self._tenants.setdefault(tenant_id, _TenantSlots())
        if not tenant.waiting and tenant.num_taken < self._limit(tenant_id):
            tenant.num_taken += 1
        else:
            await self._wait(tenant_id, tenant)
        try:
            yield
        finally:
            self._release(tenant_id, tenant)

    def _limit(self, tenant_id: str) -> int:
        return self._alone if self._recent.is_alone(tenant_id) else self._per_tenant

    async def _wait(self, tenant_id: str, tenant: _TenantSlots) -> None:
        """Returns when this caller has a slot."""
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

    def _release(self, tenant_id: str, tenant: _TenantSlots) -> None:
        tenant.num_taken -= 1
        while tenant.waiting and tenant.num_taken < self._limit(tenant_id):
            turn = tenant.waiting.popleft()
            if not turn.done():  # done: it stopped waiting
                tenant.num_taken += 1
                turn.set_result(None)
        if not tenant.num_taken and not tenant.waiting:
            self._tenants.pop(tenant_id, None)


def _too_many() -> Overloaded:
    return Overloaded("this tenant has too many requests in preparation", retry_after_s=1.0)
