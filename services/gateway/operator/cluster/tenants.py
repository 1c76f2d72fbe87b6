"""Tenants' usage of today and their current use of their limits, for the cluster's operator.

A report is read from Redis for an operator's request, at most once in READ_S for all operators. If
Redis does not answer, the last report is returned with `is_current` false.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from math import inf

import msgspec
import structlog

from services.gateway.tenancy.usage_counter import day_of
from shared.clock import Clock
from shared.fleet.tenant_views import TenantRefusal, TenantSite
from shared.store import Store, StoreUnavailable
from shared.tenancy.leases.rates import RATES
from shared.tenancy.rate_limit import enforced_limits
from shared.tenancy.tenant import USAGE_KINDS, TenantRecord, UsageRow
from shared.tenancy.tenant_admin import TenantAdmin

log = structlog.get_logger(__name__)

READ_S = 5.0
MAX_TENANTS = 100  # rows of a report


class LimitUse(msgspec.Struct, frozen=True):
    """The use of one limit. `name` is the field of TenantRecord. `used` of a rate is the part of
    one minute's amount that is used now.
    """

    name: str
    used: int
    limit: int


class TenantUse(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of one tenant today, over all gateways and models. Cached tokens are part of the
    input tokens.
    """

    tenant_id: str
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    num_open: int
    limits: list[LimitUse]
    # where its requests ended, as `a/fr 12, b/de 3`, since the start of the gateways
    sites: str = ""
    refused: str = ""  # of its data, by check and region, as `decode 2 (us)`


class TenantsReport(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of tenants on `day`. If `is_current` is false, Redis did not answer and the rows
    are older. `num_tenants` counts all tenants; those with the first MAX_TENANTS ids have rows.
    """

    day: str = ""
    is_current: bool = True
    num_tenants: int = 0
    tenants: list[TenantUse] = []


class TenantUsage:
    """Reads reports from Redis. `wall` returns Unix seconds."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        wall: Callable[[], float],
        ran: Callable[[], Sequence[TenantSite]] = tuple,
        refused: Callable[[], Sequence[TenantRefusal]] = tuple,
    ) -> None:
        """`ran` returns where the requests of tenants ended, nothing without links and regions;
        `refused` what was refused of their data.
        """
        self._ran = ran
        self._refused = refused
        self._admin = TenantAdmin(store, wall)
        self._clock = clock
        self._wall = wall
        self._report = TenantsReport()
        self._read_at = -inf
        self._reading = asyncio.Lock()

    async def report(self) -> TenantsReport:
        """Returns the report. Concurrent callers share one reading."""
        async with self._reading:
            if self._clock.now() - self._read_at >= READ_S:
                try:
                    self._report = await self._read()
                except StoreUnavailable as error:
                    log.warning("tenants_read_failed", error=error.message)
                    self._report = msgspec.structs.replace(self._report, is_current=False)
                self._read_at = self._clock.now()
            return self._report

    async def _read(self) -> TenantsReport:
        day, tenants = day_of(self._wall()), await self._admin.all()
        shown = dict(list(tenants.items())[:MAX_TENANTS])
        usage = await self._admin.usage(list(shown), [day])
        ran, refused = self._ran(), self._refused()
        rows = [
            await self._row(
                name,
                record,
                [each for each in usage if each.tenant_id == name],
                [each for each in ran if each.tenant_id == name],
                [each for each in refused if each.tenant_id == name],
            )
            for name, record in shown.items()
        ]
        return TenantsReport(day=day, num_tenants=len(tenants), tenants=rows)

    async def _row(
        self,
        tenant_id: str,
        record: TenantRecord | None,
        usage: list[UsageRow],
        ran: list[TenantSite],
        refused: list[TenantRefusal],
    ) -> TenantUse:
        """Returns a tenant's row. `record` is None if it is unreadable."""
        known = TenantRecord(tenant_id=tenant_id) if record is None else record
        state, limits = await self._admin.state(known), enforced_limits(known)
        used = {"concurrency": state.num_open} | {name: round(state.used[name]) for name in RATES}
        sums: Counter[str] = Counter()
        for each in usage:
            sums.update({kind: getattr(each, kind) for kind in USAGE_KINDS})
        return TenantUse(
            tenant_id=tenant_id,
            **{kind: sums[kind] for kind in USAGE_KINDS},
            num_open=state.num_open,
            limits=[LimitUse(name, used[name], limit) for name, limit in limits.items()],
            sites=", ".join(map(str, ran)),
            refused=", ".join(map(str, refused)),
        )
