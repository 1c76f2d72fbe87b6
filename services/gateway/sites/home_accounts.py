"""Leases the limits of this site's tenants to other sites, and records their usage there."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shared.messages import Done, LeaseLimits, LimitsLeased, ReportUsage
from shared.store import Store, reading_reply
from shared.tenancy.home_tenants import record_totals
from shared.tenancy.rate_limit import (
    APPLY_LUA,
    LEASE_S,
    LimitCommand,
    enforced_limits,
    to_limit_state,
)
from shared.tenancy.tenant import TenantRecord, meter_of, open_requests_of


class HomeAccounts:
    def __init__(self, store: Store, wall_clock: Callable[[], float], *, gateway_id: str) -> None:
        """`gateway_id` is `{site}/{gateway}`. `wall_clock` returns Unix seconds."""
        self._store = store
        self._wall_clock = wall_clock
        self._name = gateway_id

    async def lease(self, record: TenantRecord, command: LeaseLimits) -> LimitsLeased:
        """Runs one step of another site's share. Raises StoreUnavailable."""
        keys = [meter_of(record.tenant_id), open_requests_of(record.tenant_id)]
        order = LimitCommand(
            limits=enforced_limits(record),
            lease_s=LEASE_S,
            holder=command.gateway_id,
            leased=command.step,
        )
        reply = await self._store.evaluate(APPLY_LUA, keys, [msgspec.json.encode(order)])
        with reading_reply():
            state = to_limit_state(reply).leased
            assert state is not None
        return LimitsLeased(gateway_id=self._name, state=state)

    async def record(self, peer: str, command: ReportUsage) -> Done:
        """Raises InvalidRequest, StoreUnavailable."""
        now = self._wall_clock()
        await record_totals(self._store, command.tenant_id, peer, command.day, command.totals, now)
        return Done()
