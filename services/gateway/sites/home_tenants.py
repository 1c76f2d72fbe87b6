"""Answers other sites about the tenants of this site that name them: signed copies, limits, usage.

A site that asks too often is refused before Redis is read.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from itertools import islice
from math import inf

import structlog

from services.gateway.sites.home_accounts import HomeAccounts
from shared.allowance import Allowance
from shared.background import start_awaited
from shared.clock import Clock
from shared.errors import DependencyUnavailable, InvalidRequest, Overloaded
from shared.messages import (
    MAX_COPIES,
    MAX_SENT_COPIES,
    Done,
    LeaseLimits,
    LimitsLeased,
    ReadTenantCopies,
    ReportUsage,
    SignedCopy,
    TenantCopies,
)
from shared.regions.region_classes import NO_CLASSES, RegionClasses
from shared.secrets.secret import Derived, Secret
from shared.store import Store
from shared.subjects import SITE_SEPARATOR
from shared.tenancy.home_tenants import HomeTenant, read_home_tenants
from shared.tenancy.residency import may_hold
from shared.tenancy.tenant_copy import CopyRejected, SigningKey, TenantCopy

log = structlog.get_logger(__name__)

READ_S = 0.25  # Redis is read at most as often
STEP_READ_S = 1.0  # for a step of limits
MAX_READS_PER_S = 64.0  # of one site: those of 32 gateways
MAX_STEPS_PER_S = 4096.0  # of the limits, of one site


class HomeTenants:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        accounts: HomeAccounts,
        *,
        site: str,
        gateway_id: str,
        cluster_secret: Secret,
        region_of: Callable[[str], str | None],
        classes: RegionClasses = NO_CLASSES,
    ) -> None:
        """`gateway_id` is `{site}/{gateway}`; `region_of` returns the region of another site, None
        before its first state.
        """
        self._region_of = region_of
        self._classes = classes
        self._store = store
        self._clock = clock
        self._site = site
        self._name = gateway_id
        self._accounts = accounts
        self._keys = Derived(cluster_secret, SigningKey.of_secret)
        self._read: asyncio.Task[list[HomeTenant]] | None = None
        self._read_at = -inf
        # by site: those of the servers' configuration
        self._reads = defaultdict[str, Allowance](
            lambda: Allowance(MAX_READS_PER_S, 1.0, clock.now())
        )
        self._steps = defaultdict[str, Allowance](
            lambda: Allowance(MAX_STEPS_PER_S, 1.0, clock.now())
        )
        self._unsent: set[tuple[str, int]] = set()  # logged: tenants that no site can take

    def answer(
        self, command: ReadTenantCopies | LeaseLimits | ReportUsage
    ) -> Coroutine[object, object, TenantCopies | LimitsLeased | Done]:
        """Returns the work that replies. Raises Overloaded if the site asks too often, and
        DependencyUnavailable.
        """
        peer = command.gateway_id.partition(SITE_SEPARATOR)[0]
        budget = (self._steps if isinstance(command, LeaseLimits) else self._reads)[peer]
        if not budget.takes(1.0, self._clock.now()):
            raise Overloaded("this site asks about tenants too often", retry_after_s=1.0)
        match command:
            case LeaseLimits():
                return self._lease(peer, command)
            case ReportUsage():
                return self._accounts.record(peer, command)
            case ReadTenantCopies() if (key := self._keys.current) is not None:
                return self._answer(peer, dict(command.held), key)
        raise DependencyUnavailable("tenants over sites need a cluster secret")

    async def _lease(self, peer: str, command: LeaseLimits) -> LimitsLeased:
        for each in await self._tenants(STEP_READ_S):
            if each.record.tenant_id == command.tenant_id and peer in each.record.sites:
                return await self._accounts.lease(each.record, command)
        raise InvalidRequest(f"no tenant {command.tenant_id!r} names the site {peer!r}")

    async def _answer(self, peer: str, held: dict[str, int], key: SigningKey) -> TenantCopies:
        named = [each for each in await self._tenants(READ_S) if self._is_for(peer, each)]
        if len(named) > MAX_COPIES:
            self._log_once(peer, len(named), f"only {MAX_COPIES} of its tenants are sent")
            # a site deletes what is not named: no new one takes the place of one that it has
            named.sort(key=lambda each: each.record.tenant_id not in held)
        copies, versions = [], []
        for each in named[:MAX_COPIES]:
            name = each.record.tenant_id
            versions.append((name, each.version))
            if held.get(name) != each.version:
                copies.append(each)
        signed = (self._signed(each, peer, key) for each in copies)
        return TenantCopies(
            gateway_id=self._name,
            key=key.public,
            versions=tuple(versions),
            copies=tuple(islice((each for each in signed if each is not None), MAX_SENT_COPIES)),
        )

    def _is_for(self, peer: str, tenant: HomeTenant) -> bool:
        """Whether the tenant names the site, and its record may be there. Raises
        DependencyUnavailable while that is not known: a site deletes what is not named.
        """
        record = tenant.record
        if peer not in record.sites:
            return False
        region = self._region_of(peer)
        is_allowed = may_hold(record, region or "", self._classes)
        if not is_allowed and region is None:
            raise DependencyUnavailable(f"site {peer!r} has not been heard here yet")
        if not is_allowed:
            where = f"in the region {region!r}" if region else "in no region"
            error = f"site {peer!r} is {where}, where its data may not be"
            self._log_once(record.tenant_id, tenant.version, error)
        return is_allowed

    def _signed(self, tenant: HomeTenant, peer: str, key: SigningKey) -> SignedCopy | None:
        copy = TenantCopy(
            home=self._site,
            site=peer,
            version=tenant.version,
            record=tenant.record,
            key_digests=tenant.key_digests,
        )
        try:
            return key.sign(copy)
        except CopyRejected as error:
            self._log_once(tenant.record.tenant_id, tenant.version, str(error))
            return None

    def _log_once(self, name: str, number: int, error: str) -> None:
        if (name, number) not in self._unsent:
            self._unsent = {each for each in self._unsent if each[0] != name} | {(name, number)}
            log.warning("tenant_not_sent", name=name, error=error)

    async def _tenants(self, max_age_s: float) -> list[HomeTenant]:
        """Returns the tenants as they were at most `max_age_s` ago. Raises StoreUnavailable."""
        now = self._clock.now()
        if self._read is None or (self._read.done() and now - self._read_at >= max_age_s):
            self._read_at = now
            self._read = start_awaited(read_home_tenants(self._store))
        return await asyncio.shield(self._read)
