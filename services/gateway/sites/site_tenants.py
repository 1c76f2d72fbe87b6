"""Tenants over sites, as one gateway has them: for other sites, and those of other sites here."""

from __future__ import annotations

from collections.abc import Callable, Coroutine

import structlog

from services.gateway.sites.home_accounts import HomeAccounts
from services.gateway.sites.home_tenants import HomeTenants
from services.gateway.sites.linked_homes import LinkedHomes
from services.gateway.sites.site_withdrawals import OnWithdrawn, SiteWithdrawals
from services.gateway.sites.tenant_copies import TenantCopyReader
from services.gateway.sites.tenant_kv_reads import TenantKvReads
from services.gateway.sites.usage_reports import UsageReporter
from services.gateway.tenancy.tenancy import Tenancy
from shared.background import Background, is_logged
from shared.clock import Clock
from shared.config import GatewayConfig
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import (
    Done,
    LeaseLimits,
    LeaseState,
    LeaseStep,
    LimitsLeased,
    ReadTenantCopies,
    ReadTenantKv,
    ReportUsage,
    SiteState,
    SiteTenantKv,
    TenantCopies,
    WithdrawTenant,
)
from shared.regions.region_classes import region_classes
from shared.store import StoreUnavailable
from shared.subjects import SITE_SEPARATOR, at_site, from_sites
from shared.tenancy.deletion.kv_drops import SITE_POSITIONS
from shared.tenancy.deletion.tenant_removal import TenantWithdrawal
from shared.tenancy.tenant_copy import SITES
from shared.transport.bus import Bus

log = structlog.get_logger(__name__)

LIMITS_TIMEOUT_S = 1.0

TenantCommand = ReadTenantCopies | LeaseLimits | ReportUsage | WithdrawTenant | ReadTenantKv


class SiteTenants:
    def __init__(
        self,
        config: GatewayConfig,
        bus: Bus,
        clock: Clock,
        tenancy: Tenancy,
        health_monitor: HealthMonitor,
        *,
        wall_clock: Callable[[], float],
    ) -> None:
        self._bus = bus
        self._store = store = tenancy.stores.slow
        self._limits = tenancy.limits
        self._name = name = at_site(config.site, config.process_id)
        self._background = Background()
        self.homes = homes = LinkedHomes(bus, clock, self._on_new_site)
        classes = region_classes(config.region_classes)
        accounts = HomeAccounts(tenancy.stores.fast, wall_clock, gateway_id=name)
        self._home = HomeTenants(
            store,
            clock,
            accounts,
            site=config.site,
            gateway_id=name,
            cluster_secret=config.secret("cluster_secret"),
            region_of=homes.region_of,
            classes=classes,
        )
        withdrawal = TenantWithdrawal(store, wall_clock)
        self._copies = TenantCopyReader(
            homes, clock, store, tenancy.copied, withdrawal, gateway_id=name
        )
        self._usage = UsageReporter(homes, clock, store, gateway_id=name)
        self._withdrawals = SiteWithdrawals(
            homes, clock, store, classes, withdrawal, gateway_id=name, region=config.region
        )
        self._kv_reads = TenantKvReads(homes, bus, clock, health_monitor, gateway_id=name)

    async def start(self) -> None:
        subject = from_sites("gateway", self._bus.process_id, "tenants")
        await self._bus.serve(subject, TenantCommand, self._answer)
        await self._kv_reads.serve()
        self._limits.lease_from(self._lease_limits)
        await self._copies.start()
        self._background.start_own(self._usage.run())
        self._background.start_own(self._withdrawals.run())

    async def stop(self) -> None:
        await self._background.stop()
        await self._copies.stop()

    def _on_new_site(self, site: str) -> None:
        self._background.start_item(self._note_site(site), is_logged)

    async def _note_site(self, site: str) -> None:
        try:
            await self._store.write(
                [("HSETNX", SITES, site, ""), ("HSETNX", SITE_POSITIONS, site, 0)]
            )
        except StoreUnavailable:
            self.homes.by_site.pop(site, None)  # the next state tries again

    def _answer(
        self, command: TenantCommand
    ) -> Coroutine[object, object, TenantCopies | LimitsLeased | Done | SiteTenantKv]:
        match command:
            case WithdrawTenant():
                return self._withdrawals.answer(command)
            case ReadTenantKv():
                return self._kv_reads.answer(command)
        return self._home.answer(command)

    def on_withdrawn(self, withdraw: OnWithdrawn) -> None:
        """Has `withdraw` called for each tenant of another site that leaves this one."""
        self._withdrawals.on_withdrawn = withdraw

    def observe(self, state: SiteState) -> None:
        """Takes the state of a gateway of a linked site."""
        self.homes.observe(state)

    async def _lease_limits(self, tenant_id: str, step: LeaseStep) -> LeaseState:
        """Runs one step of this gateway's share at the tenant's home. Raises the errors of the home
        site, and DependencyUnavailable if it does not answer.
        """
        home, _, name = tenant_id.partition(SITE_SEPARATOR)
        command = LeaseLimits(gateway_id=self._name, tenant_id=name, step=step)
        reply = await self.homes.request(home, command, LimitsLeased, timeout_s=LIMITS_TIMEOUT_S)
        return reply.state
