"""Six linked sites with the tenants of a plan, all of whose traffic is searched."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from services.gateway.tenancy.permissions import may_store
from shared.errors import ConfigError
from shared.packing import pack_token_ids
from shared.store import Command
from shared.tenancy.declared_classes import declare_classes
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import PinnedPrefix
from shared.tenancy.refusals import Refusals
from shared.tenancy.residency import may_hold
from shared.tenancy.tenant import TenantRecord
from shared.tenancy.tenant_admin import TenantAdmin
from tests.simulation.plan import Plan
from tests.simulation.residency.borders import WITHDRAWN_S, Borders
from tests.simulation.residency.canaries import fingerprints_of, search_of_all
from tests.simulation.residency.gateway import RegionGateway
from tests.simulation.residency.plan import CLASSES, PLANTED, ResidencyPlan, TenantPlan
from tests.simulation.residency.traffic import Traffic, pieces_of
from tests.simulation.sites.world import LinkedFleets
from tests.simulation.world.fleet import JOIN_S, Fleet
from tests.simulation.world.members import AnyHost, health_monitor_of
from tests.support.world.process import SimulatedProcess
from tests.support.world.store import MemoryStore
from tests.support.world.workers import MODEL, SimulatedWorker

HEARD_S = 1.0  # after a fault, until the next state of a site has come
CHECKED_EACH_S = 5.0  # what lies in Redis and in caches


class SearchedStore(MemoryStore):
    """A Redis of one region, all writes to which are searched."""

    def __init__(self, region: str, traffic: Traffic) -> None:
        super().__init__()
        self._region, self._traffic = region, traffic
        self.num_forbidden = 0  # writes that a script has refused

    def apply(self, commands: Sequence[Command]) -> None:
        for _, key, *arguments in commands:
            data = b" ".join(piece for each in arguments for piece in pieces_of(each))
            self._traffic.write(self._region, (str(key),), data)
        super().apply(commands)

    async def evaluate(
        self, script: str, keys: Sequence[str], arguments: Sequence[str | bytes | int | float]
    ) -> Any:
        reply = await super().evaluate(script, keys, arguments)
        if b"forbidden" in (reply if isinstance(reply, list) else [reply]):
            self.num_forbidden += 1
        else:
            data = b" ".join(piece for each in arguments for piece in pieces_of(each))
            self._traffic.write(self._region, tuple(keys), data)
        return reply

    def check(self) -> None:
        """Searches all that lies here."""
        for key, value in self.data.items():
            self._traffic.write(self._region, (key,), b" ".join(pieces_of(value)))


class RegionFleet(Fleet):
    """One site of a plan."""

    gateway_type = RegionGateway
    classes = CLASSES

    def __init__(self, plan: Plan, of: ResidencyFleets, *, site: str, region: str) -> None:
        super().__init__(plan, site=site, region=region)
        self._of = of
        self.store = SearchedStore(region, of.traffic)
        of.regions_of[self._operator.process] = region
        self.network.delivery_taps.append(of.traffic.message)
        self.plane.taps.append(of.traffic.frame)

    async def store_tenants(self) -> None:
        """Of this site, as its operator does."""
        await declare_classes(self.store, CLASSES)
        admin = TenantAdmin(self.store, self.store.now)
        for each in self._of.of_tenants.tenants.values():
            if each.home == self.site:
                fields = {**each.limits.changes, "is_zero_retention": each.is_zero_retention}
                record = await admin.add(each.tenant_id, fields, each.tenant_id)
                if each.tenant_id in self._of.of_tenants.prefixes:
                    await self._save_prefix(record, each)

    async def _save_prefix(self, record: TenantRecord, tenant: TenantPlan) -> None:
        """As a gateway of this site does for its tenant."""
        if may_hold(record, self.region, CLASSES) and may_store(record, self.region):
            prefix = PinnedPrefix(
                name="system-prompt",
                tenant_id=tenant.tenant_id,
                model=MODEL,
                messages=[{"role": "system", "content": tenant.text}],
                token_ids=pack_token_ids(tenant.stem),
                created_at=0,
            )
            await pinned_prefix.save(self.store, prefix, 0.0, owner=record, region=self.region)

    def _new_host(self, role: str, process_id: str) -> AnyHost:
        host = super()._new_host(role, process_id)
        self._of.regions_of[host.process] = self.region_of(process_id)
        self._of.refusals.append(health_monitor_of(host).refusals)
        if isinstance(host, RegionGateway):
            host.take_spans = self._of.traffic.span
            host.text_of = lambda tenant_id: self._of.of_tenants.tenants[tenant_id].text
        return host

    def workers_at_home(self) -> list[SimulatedWorker]:
        """Returns the workers in this site's region."""
        return [each for each in self.workers() if self.region_of(each.worker_id) == self.region]

    def check(self) -> None:
        """Searches what lies in Redis and in the caches of workers."""
        self.store.check()
        for worker in self.workers():
            region = frozenset({self.region_of(worker.worker_id)})
            self._of.traffic.add("memory", "cache", region, cached_kv(worker))


def cached_kv(worker: SimulatedWorker) -> bytes:
    return bytes(worker.executor._kv.tobytes())


def longest_fault_s(plan: ResidencyPlan) -> float:
    """Returns the seconds until what the longest fault of a process or link held up is over, with
    the delay of a link's last message; 0 without any.
    """
    of_links = (each.duration_s + each.delay_s for each in plan.sites.faults)
    of_processes = (each.duration_s for site in plan.sites.sites.values() for each in site.faults)
    return max((each + HEARD_S for each in (*of_links, *of_processes)), default=0.0)


class ResidencyFleets(LinkedFleets):
    classes = CLASSES

    def __init__(self, plan: ResidencyPlan) -> None:
        self.of_tenants = plan
        self.borders = Borders(WITHDRAWN_S + longest_fault_s(plan))
        self.borders.begin(plan.tenants.values())
        self.regions_of: dict[SimulatedProcess, str] = {}
        self.refusals: list[Refusals] = []  # of all processes that have been
        fingerprints = fingerprints_of(plan.tenants.values())
        self.traffic = Traffic(
            search_of_all().copy(), fingerprints, self.borders, self.regions_of.__getitem__
        )
        super().__init__(plan.sites)

    def new_fleet(self, plan: Plan, site: str, region: str) -> Fleet:
        return RegionFleet(plan, self, site=site, region=region)

    def _check_departure(self, site: str, sender: str, subject: str, data: bytes) -> None:
        if not sender.startswith(PLANTED):
            super()._check_departure(site, sender, subject, data)

    async def suffer(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(super().suffer())
            group.create_task(self._change_tenants())

    async def _change_tenants(self) -> None:
        loop = asyncio.get_running_loop()
        for change in self.of_tenants.changes:
            await asyncio.sleep(max(0.0, JOIN_S + change.at_s - loop.time()))
            store = self.fleets[self.of_tenants.tenants[change.tenant_id].home].store
            with suppress(ConfigError):  # regions of no class, at a site that is linked
                await TenantAdmin(store, store.now).change(change.tenant_id, change.limits.changes)
                self.borders.change(change.tenant_id, change.limits, loop.time())

    async def keep_checking(self) -> None:
        while True:
            await asyncio.sleep(CHECKED_EACH_S)
            self.check()

    def check(self) -> None:
        """Searches what lies at each site."""
        for fleet in self.fleets.values():
            assert isinstance(fleet, RegionFleet)
            fleet.check()
