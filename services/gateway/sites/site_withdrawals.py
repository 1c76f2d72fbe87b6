"""Has other sites drop what they hold of tenants whose data may not be there any more.

Redis has the orders, and how far each site has confirmed them (`site_drops.py`): so a site that was
cut off gets what it has missed, and a gateway that starts sends what was ordered without it. Every
gateway sends; the others see in Redis what the first one has had confirmed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence

import structlog

from services.gateway.sites.linked_homes import LinkedHomes, site_of, tenant_of
from shared.allowance import Allowance
from shared.background import failing_alone
from shared.clock import Clock
from shared.errors import HearthError, InvalidRequest, Overloaded
from shared.messages import MAX_USAGE_OF, Done, WithdrawTenant
from shared.regions.region_classes import RegionClasses
from shared.store import Store, StoreUnavailable
from shared.subjects import is_at_site
from shared.tenancy.deletion import kv_drops, site_drops
from shared.tenancy.deletion.kv_drops import KvDrop
from shared.tenancy.deletion.site_drops import SiteDrop
from shared.tenancy.deletion.tenant_removal import TenantWithdrawal
from shared.tenancy.tenant import TENANTS, decoded_tenant

log = structlog.get_logger(__name__)

ROUND_S = 0.25
TIMEOUT_S = 1.0
MAX_AT_ONCE = 16  # to one site
MAX_PER_S = 64.0  # of one site
MAX_KEPT_CHARS = 32_768  # of one order: a site may have a thousand in Redis

# Called with a tenant `{site}/{tenant}`, and whether this gateway's region still may have its data.
OnWithdrawn = Callable[[str, bool], None]


class SiteWithdrawals:
    def __init__(
        self,
        homes: LinkedHomes,
        clock: Clock,
        store: Store,
        classes: RegionClasses,
        withdrawal: TenantWithdrawal,
        *,
        gateway_id: str,
        region: str,
    ) -> None:
        """`gateway_id` is `{site}/{gateway}`, in `region`. `withdrawal` deletes what this site
        holds.
        """
        self._homes = homes
        self._clock = clock
        self._store = store
        self._classes = classes
        self._withdrawal = withdrawal
        self._name, self._region = gateway_id, region
        self.on_withdrawn: OnWithdrawn = _ignore
        self._last = 0  # the number of the last order
        self._seen: int | None = None  # the same; None before the first round
        self._drops: Sequence[KvDrop] = ()
        self._forgotten = 0  # the last one that is not among them
        # By site, as Redis has them. One that was emptied has none: all may have been missed.
        self._positions: dict[str, int] = {}
        self._caught_up: dict[str, set[str]] = {}  # by site that has missed orders: tenants sent
        self._allowed: dict[str, Allowance] = {}  # by site: those of the configuration

    # ── to other sites ───────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        while True:
            with failing_alone("withdrawals_not_sent"):
                try:
                    await self.round()
                except StoreUnavailable as error:  # the next round reads what was ordered since
                    log.debug("withdrawals_not_read", reason=error.message)
            await self._clock.sleep(ROUND_S)

    async def round(self) -> None:
        """Sends to each site that is heard what it has not confirmed. Raises StoreUnavailable."""
        last = await kv_drops.last_number(self._store)
        if last != self._last:
            self._drops = [each.drop for each in await kv_drops.orders(self._store)]
            if last < self._last:  # of a Redis that was emptied
                self._caught_up.clear()
            self._forgotten = await kv_drops.last_forgotten(self._store)
            self._positions, self._last = {}, last
            self._report_new(last)
        self._seen = last
        behind = [each for each in self._homes.by_site if self._is_behind(each)]
        if behind:
            self._positions = await site_drops.positions(self._store)
            await asyncio.gather(*(self._send(each) for each in behind if self._is_behind(each)))

    def _report_new(self, last: int) -> None:
        """Reports what was ordered since the last round, at whichever gateway of this site."""
        if self._seen is None:  # this gateway has just started: it knows of nothing that is held
            return
        before = self._seen if last > self._seen else 0  # 0: Redis was emptied
        for each in self._drops:
            if each.number > before and is_at_site(each.tenant_id):
                is_kept = each.reason == "regions" and self._region in (each.kept_regions or ())
                self.on_withdrawn(each.tenant_id, is_kept)

    def _is_behind(self, site: str) -> bool:
        return self._positions.get(site) != self._last and self._homes.is_heard(site)

    async def _send(self, site: str) -> None:
        """Sends a site its orders. Never raises, so that one site does not delay the others."""
        with failing_alone("withdrawals_not_sent", site=site):
            try:
                confirmed = await self._send_orders(site)
                if confirmed is not None:
                    await site_drops.confirm(self._store, site, confirmed)
            except StoreUnavailable as error:
                log.debug("withdrawals_not_confirmed", site=site, reason=error.message)

    async def _send_orders(self, site: str) -> int | None:
        """Returns the number up to which the site has confirmed; None: no further than before.
        Raises StoreUnavailable.
        """
        position = self._positions.get(site, -1)
        position = -1 if position > self._last else position  # that of a Redis before
        if (position < 0 or position < self._forgotten) and not await self._catch_up(site):
            return None
        self._caught_up.pop(site, None)
        due = site_drops.orders_for(self._drops, position, self._classes)
        for first in range(0, len(due), MAX_AT_ONCE):
            some = due[first : first + MAX_AT_ONCE]
            num_sent = await self._send_some(site, some)
            if num_sent < len(some):
                return some[num_sent].number - 1
        return self._last

    async def _catch_up(self, site: str) -> bool:
        """Returns whether the site has confirmed all; the next round goes on with the others.
        Raises StoreUnavailable.
        """
        sent = self._caught_up.setdefault(site, set())
        due = [each for each in await self._of_all_tenants() if each.tenant_id not in sent]
        for first in range(0, len(due), MAX_AT_ONCE):
            some = due[first : first + MAX_AT_ONCE]
            num_sent = await self._send_some(site, some)
            sent.update(each.tenant_id for each in some[:num_sent])
            if num_sent < len(some):
                return False
        return True

    async def _of_all_tenants(self) -> list[SiteDrop]:
        found = map(decoded_tenant, (await self._store.hash_get(TENANTS)).values())
        records = (each for each in found if each is not None)
        return site_drops.drops_of_records(records, self._classes)

    async def _send_some(self, site: str, drops: list[SiteDrop]) -> int:
        """Returns how many the site has confirmed before the first that it has not."""
        confirmed = await asyncio.gather(*(self._send_order(site, each) for each in drops))
        return [*confirmed, False].index(False)

    async def _send_order(self, site: str, drop: SiteDrop) -> bool:
        command = WithdrawTenant(
            gateway_id=self._name,
            tenant_id=drop.tenant_id,
            kept_regions=tuple(sorted(drop.kept)),
            usage_of=drop.usage_of[-MAX_USAGE_OF:],
        )
        try:
            await self._homes.request(site, command, Done, timeout_s=TIMEOUT_S)
        except HearthError as error:  # the next round asks again
            log.debug("withdrawal_not_sent", site=site, reason=error.message)
            return False
        return True

    # ── from other sites ─────────────────────────────────────────────────────────────────────────

    def answer(self, command: WithdrawTenant) -> Coroutine[object, object, Done]:
        """Returns the work that replies to another site, about a tenant of its own. Raises
        Overloaded and InvalidRequest.
        """
        site, now = site_of(command.gateway_id), self._clock.now()
        allowed = self._allowed.setdefault(site, Allowance(MAX_PER_S, 1.0, now))
        if not allowed.takes(1.0, now):
            raise Overloaded("this site withdraws too many tenants", retry_after_s=1.0)
        if sum(map(len, command.kept_regions)) > MAX_KEPT_CHARS:
            raise InvalidRequest("the names of the kept regions are too long")
        name = tenant_of(command.gateway_id, command.tenant_id)
        return self._withdraw(name, command)

    async def _withdraw(self, tenant_id: str, command: WithdrawTenant) -> Done:
        is_kept = self._region in command.kept_regions
        self.on_withdrawn(tenant_id, is_kept)
        if is_kept:  # workers of this site may be in other regions
            await self._withdrawal.order(tenant_id, "regions", command.kept_regions)
        else:
            await self._withdrawal.delete(tenant_id, "regions")
        await self._withdrawal.delete_usage(tenant_id, command.usage_of)
        return Done()


def _ignore(tenant_id: str, is_kept_here: bool) -> None:
    pass
