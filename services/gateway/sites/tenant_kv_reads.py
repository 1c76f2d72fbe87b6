"""KV of this site's tenants at other sites, for operators, and of theirs here.

An operator asks any gateway here, which asks a gateway of each site, which asks its workers. Only
sums cross a link, and a site hears of its own tenants alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from services.gateway.sites.linked_homes import LinkedHomes, site_of, tenant_of
from shared.allowance import Allowance
from shared.clock import Clock
from shared.errors import HearthError, Overloaded
from shared.fleet.kv_elsewhere import MAX_SITES, KvElsewhere, ReadKvElsewhere, SiteKv
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import CountTenantKv, Heartbeat, ReadTenantKv, SiteTenantKv, TenantKvCounted
from shared.sites.tenant_names import names_of
from shared.subjects import (
    READ_KV_ELSEWHERE,
    READ_KV_ELSEWHERE_GROUP,
    is_at_site,
    tenant_kv,
)
from shared.transport.bus import Bus
from shared.transport.wire_errors import printable_line

WORKER_TIMEOUT_S = 0.5  # plus the round trip
SITE_TIMEOUT_S = 3.0
MAX_AT_ONCE = 64  # workers
MAX_PER_S = 2.0  # of one site: each is a request to every worker
MAX_PROBLEM = 200  # characters of what another site says


class TenantKvReads:
    def __init__(
        self,
        homes: LinkedHomes,
        bus: Bus,
        clock: Clock,
        health_monitor: HealthMonitor,
        *,
        gateway_id: str,
    ) -> None:
        """`gateway_id` is `{site}/{gateway}`."""
        self._homes = homes
        self._bus = bus
        self._clock = clock
        self._fleet = health_monitor.fleet
        self._requests = health_monitor.requests
        self._name = gateway_id
        self._allowed: dict[str, Allowance] = {}  # by site: those of the configuration

    async def serve(self) -> None:
        await self._bus.serve(
            READ_KV_ELSEWHERE, ReadKvElsewhere, self._read, queue=READ_KV_ELSEWHERE_GROUP
        )

    # ── at other sites ───────────────────────────────────────────────────────────────────────────

    async def _read(self, command: ReadKvElsewhere) -> KvElsewhere:
        sites = sorted(self._homes.by_site)[:MAX_SITES]
        found = await asyncio.gather(*(self._at(each, command.tenant_id) for each in sites))
        return KvElsewhere(gateway_id=self._bus.process_id, sites=tuple(found))

    async def _at(self, site: str, tenant_id: str) -> SiteKv:
        region = self._homes.region_of(site) or ""
        command = ReadTenantKv(gateway_id=self._name, tenant_id=tenant_id)
        try:
            kv = await self._homes.request(site, command, SiteTenantKv, timeout_s=SITE_TIMEOUT_S)
        except HearthError as error:
            problem = printable_line(error.message, MAX_PROBLEM)
            return SiteKv(site=site, region=region, problem=problem)
        return SiteKv(site=site, region=region, kv=kv)

    # ── of other sites ───────────────────────────────────────────────────────────────────────────

    def answer(self, command: ReadTenantKv) -> Coroutine[object, object, SiteTenantKv]:
        """Returns the work that replies to another site, about a tenant of its own. Raises
        Overloaded and InvalidRequest.
        """
        site, now = site_of(command.gateway_id), self._clock.now()
        allowed = self._allowed.setdefault(site, Allowance(MAX_PER_S, 1.0, now))
        if not allowed.takes(1.0, now):
            raise Overloaded("this site asks for the KV of tenants too often", retry_after_s=1.0)
        return self._count(tenant_of(command.gateway_id, command.tenant_id))

    async def _count(self, tenant_id: str) -> SiteTenantKv:
        """Returns the sums of all workers of this site, also of those that drain."""
        workers = [
            each
            for each in self._fleet.everyone()
            if each.load is not None and not is_at_site(each.process_id)
        ]
        own, shared = names_of(tenant_id)
        found = await self._of_workers(workers, own)
        known = [each for each in found if each is not None]
        others = [each for each in await self._of_workers(workers, shared) if each is not None]
        return SiteTenantKv(
            num_cached_tokens=sum(each.num_cached_tokens for each in known),
            num_held_tokens=sum(each.num_held_tokens for each in known),
            num_shared_tokens=sum(each.num_cached_tokens + each.num_held_tokens for each in others),
            num_workers=len(workers),
            num_unknown_workers=len(workers) - min(len(known), len(others)),
        )

    async def _of_workers(
        self, workers: list[Heartbeat], name: str
    ) -> list[TenantKvCounted | None]:
        """Returns the counts of each worker; None for one that does not reply."""
        found: list[TenantKvCounted | None] = []
        for first in range(0, len(workers), MAX_AT_ONCE):
            some = workers[first : first + MAX_AT_ONCE]
            found += await asyncio.gather(*(self._of_worker(each, name) for each in some))
        return found

    async def _of_worker(self, worker: Heartbeat, name: str) -> TenantKvCounted | None:
        subject = tenant_kv(worker.roles[0], worker.process_id)
        try:
            return await self._requests.request(
                worker.process_id,
                subject,
                CountTenantKv(tenant_id=name),
                TenantKvCounted,
                base_s=WORKER_TIMEOUT_S,
            )
        except HearthError:
            return None
