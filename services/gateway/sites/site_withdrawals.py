"""Has other sites drop what they hold of tenants whose data may not be there any more.

A site that is cut off is told once its link is back, as long as this gateway lives.
"""

from __future__ import annotations

from collections.abc import Coroutine

import structlog

from services.gateway.sites.linked_homes import LinkedHomes, site_of
from services.gateway.streams.changed_regions import ChangedRegions
from shared.allowance import Allowance
from shared.background import failing_alone
from shared.clock import Clock
from shared.errors import HearthError, Overloaded
from shared.messages import Done, WithdrawTenant
from shared.subjects import at_site
from shared.tenancy.deletion.tenant_removal import TenantWithdrawal

log = structlog.get_logger(__name__)

RETRY_S = 0.25
TIMEOUT_S = 1.0
MAX_PER_S = 64.0  # of one site
MAX_PENDING = 10_000  # tenants and sites


class SiteWithdrawals:
    def __init__(
        self, homes: LinkedHomes, clock: Clock, withdrawal: TenantWithdrawal, *, gateway_id: str
    ) -> None:
        """`gateway_id` is `{site}/{gateway}`. `withdrawal` deletes what this site holds."""
        self._homes = homes
        self._clock = clock
        self._withdrawal = withdrawal
        self._name = gateway_id
        self._pending: dict[tuple[str, str], None] = {}  # site, tenant
        self._allowed: dict[str, Allowance] = {}  # by site: those of the configuration

    def regions_changed(self, changed: ChangedRegions) -> None:
        """Has the sites asked that the tenant has left."""
        for site in self._homes.by_site:
            if changed.excludes(self._homes.region_of(site)) and len(self._pending) < MAX_PENDING:
                self._pending[site, changed.tenant_id] = None

    async def run(self) -> None:
        while True:
            with failing_alone("withdrawals_not_sent"):
                await self.send()
            await self._clock.sleep(RETRY_S)

    async def send(self) -> None:
        """Asks the sites that are heard; those that do not reply are asked again."""
        for site, tenant_id in [each for each in self._pending if self._homes.is_heard(each[0])]:
            command = WithdrawTenant(gateway_id=self._name, tenant_id=tenant_id)
            try:
                await self._homes.request(site, command, Done, timeout_s=TIMEOUT_S)
            except HearthError as error:
                log.debug("withdrawal_not_sent", site=site, reason=error.message)
                continue
            del self._pending[site, tenant_id]

    def answer(self, command: WithdrawTenant) -> Coroutine[object, object, Done]:
        """Returns the work that replies to another site, about a tenant of its own. Raises
        Overloaded.
        """
        site, now = site_of(command.gateway_id), self._clock.now()
        allowed = self._allowed.setdefault(site, Allowance(MAX_PER_S, 1.0, now))
        if not allowed.takes(1.0, now):
            raise Overloaded("this site withdraws too many tenants", retry_after_s=1.0)
        return self._withdraw(at_site(site, command.tenant_id))

    async def _withdraw(self, tenant_id: str) -> Done:
        await self._withdrawal.order(tenant_id, "regions")
        return Done()
