"""Applies the limits of this site's tenants for other sites, and records their usage there."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from services.gateway.sites.limit_steps import command_of
from shared.messages import ApplyLimits, Done, LimitsApplied, ReportUsage
from shared.store import Store, reading_reply
from shared.tenancy.rate_limit import APPLY_LUA, to_limit_state
from shared.tenancy.site_usage import record_totals
from shared.tenancy.tenant import TenantRecord, meter_of, open_requests_of


class HomeAccounts:
    def __init__(self, store: Store, wall_clock: Callable[[], float], *, gateway_id: str) -> None:
        """`gateway_id` is `{site}/{gateway}`. `wall_clock` returns Unix seconds."""
        self._store = store
        self._wall_clock = wall_clock
        self._name = gateway_id

    async def apply(self, record: TenantRecord, peer: str, command: ApplyLimits) -> LimitsApplied:
        """Raises StoreUnavailable."""
        keys = [meter_of(record.tenant_id), open_requests_of(record.tenant_id)]
        data = msgspec.json.encode(command_of(record, peer, command))
        reply = await self._store.evaluate(APPLY_LUA, keys, [data])
        with reading_reply():
            state = to_limit_state(reply)
        return LimitsApplied(
            gateway_id=self._name,
            rejected_by=state.rejected_by,
            wait_s=state.wait_s,
            used=state.used,
            num_open=state.num_open,
        )

    async def record(self, peer: str, command: ReportUsage) -> Done:
        """Raises InvalidRequest, StoreUnavailable."""
        now = self._wall_clock()
        await record_totals(self._store, command.tenant_id, peer, command.day, command.totals, now)
        return Done()
