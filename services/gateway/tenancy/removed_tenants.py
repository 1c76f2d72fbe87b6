"""Ends the requests of removed tenants, forgets what this gateway has of them and of tenants that
switch zero retention on, and reports deletions that have not finished.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from services.gateway.tenancy.errors import UnknownTenant
from shared.background import failing_alone
from shared.clock import Clock
from shared.errors import HearthError
from shared.store import Store, StoreUnavailable
from shared.tenancy.deletion import kv_drops
from shared.tenancy.deletion.kv_drops import OrderedDrop

log = structlog.get_logger(__name__)

POLL_S = 0.5
REPEAT_S = 8.0  # a request in preparation opens later; a tenant of this name may come back after it


class RemovedTenants:
    """Polls the orders to drop KV. `wall_clock` returns Unix seconds."""

    def __init__(self, store: Store, clock: Clock, wall_clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._wall_clock = wall_clock
        self._last: int | None = None  # the last order that was read; None: none was
        self._ending: dict[str, float] = {}  # tenant → the last time to end its requests
        self._oldest_at: float | None = None  # Unix seconds

    @property
    def unfinished_s(self) -> float:
        """The age of the oldest deletion that has not finished; 0: there is none."""
        return 0.0 if self._oldest_at is None else max(0.0, self._wall_clock() - self._oldest_at)

    async def run(
        self, close: Callable[[str, HearthError], None], forget: Callable[[str], object]
    ) -> None:
        """`close` ends the requests of a tenant with an error. `forget` removes what this gateway
        holds of a tenant.
        """
        while True:
            with failing_alone("removed_tenants_not_read"):
                await self.poll(close, forget)
            await self._clock.sleep(POLL_S)

    async def poll(
        self, close: Callable[[str, HearthError], None], forget: Callable[[str], object]
    ) -> None:
        fresh = set[str]()
        try:
            last = await kv_drops.last_number(self._store)
            if last != self._last or self._oldest_at is not None:
                fresh = self._take(await kv_drops.orders(self._store), last)
        except StoreUnavailable as error:
            log.debug("removed_tenants_not_read", reason=error.message)
        now = self._clock.now()
        self._ending = {each: until for each, until in self._ending.items() if until >= now}
        for tenant_id in self._ending:
            close(tenant_id, UnknownTenant(f"the tenant {tenant_id!r} has been removed"))
        for tenant_id in {*fresh, *self._ending}:
            forget(tenant_id)

    def _take(self, found: list[OrderedDrop], last: int) -> set[str]:
        """Returns the tenants of new orders, of whom nothing may be held."""
        oldest = kv_drops.oldest_unfinished(found)
        self._oldest_at = None if oldest is None else oldest.ordered_at
        until, fresh = self._clock.now() + REPEAT_S, set[str]()
        for each in found:
            is_new = self._last is not None and each.drop.number > self._last
            if is_new and each.drop.reason == "removed":
                self._ending[each.drop.tenant_id] = until
            if is_new and each.drop.reason != "regions":
                fresh.add(each.drop.tenant_id)
        self._last = last
        return fresh
