"""Admits a tenant's requests and accounts for the open ones.

    asked ──admit──▶ open ──charge──▶ open ──settle──▶ unsettled ──sent, or lease expired──▶ removed
      └──rejected      └──rejected

`admit` charges the request and counts it under `concurrency` before its body is read; `charge` adds
the tokens once they are known, only for tenants with a token limit. Redis decides for all gateways,
in one round trip each. While Redis is unavailable, this gateway's local counter, which counts every
request too, decides on the limit divided by the number of gateways; a request larger than this part
needs an empty meter and fills it. A Redis that has returned empty still decides, and counts from
zero: a tenant gets at most one minute's limit again, whereas local counters would allow each
gateway a limit of its own. Open requests renew their leases: they are in an emptied Redis again
within `RENEW_S`, and those of a dead gateway stop counting after `LEASE_S`. Settled requests are
sent in the background and with the tenant's next request, so a client that has a response never
finds that request still counted. Settling is idempotent.

The limits of another site's tenant are leased from its home (`lease_from`): this gateway spends a
share of them, and asks for more (`site_leases.py`). While no gateway of the home answers and the
share does not cover a request, the local counter decides on the part of each site: the limit
divided by the number of the tenant's sites and of this site's gateways. It has counted what was
admitted before, so a link that is cut starts no new minute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import NoReturn

import msgspec
import structlog

from services.gateway.tenancy.errors import EXHAUSTED
from services.gateway.tenancy.ratelimit_headers import ratelimit_headers
from services.gateway.tenancy.request_cost import (
    UNKNOWN_COST,
    LimitLease,
    RequestCost,
    check_size,
    check_zeros,
    has_token_limit,
)
from services.gateway.tenancy.site_leases import LeaseAtHome, SiteLeases
from shared.background import Background, failing_alone
from shared.clock import Clock
from shared.store import BREAKER_S, Store, StoreRejected, StoreUnavailable, reading_reply
from shared.tenancy.leases.rates import RATES
from shared.tenancy.rate_limit import (
    APPLY_EACH_LUA,
    APPLY_LUA,
    LEASE_S,
    LimitCommand,
    LimitState,
    RateLimitCounter,
    RequestedTokens,
    Settled,
    enforced_limits,
    to_limit_state,
)
from shared.tenancy.site_admin import is_copied
from shared.tenancy.tenant import TenantRecord, meter_of, open_requests_of

log = structlog.get_logger(__name__)

RENEW_S = LEASE_S / 3
MAX_SETTLED = 256  # settled requests per command; the rest follow
# Tenants per round trip: with 1,000 tenants and a Redis at 200 ms, leases are renewed within 4 s.
MAX_TENANTS = 64
# Concurrent calls of a tenant: each takes a connection, of which Redis has 10,000 for all gateways.
# With a Redis at 200 ms, 320 requests of the tenant are admitted in a second, or 160 with a token
# limit, since tokens are charged in another call.
MAX_CALLS = 64

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _LimitedTenant:
    """This gateway's state of a tenant with limits. `tenant` is the latest record."""

    tenant: TenantRecord
    counter: RateLimitCounter = field(default_factory=RateLimitCounter)
    open: dict[str, LimitLease] = field(default_factory=dict)
    unsettled: dict[str, tuple[Settled, float]] = field(default_factory=dict)  # and expiry
    is_local: bool = False  # whether the local counter decided last
    # The tenant's requests_per_min, the limit that decided, and the time until which it rejects.
    closed: tuple[int, int, float] = (0, 0, 0.0)
    calls: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CALLS))

    @property
    def is_copied(self) -> bool:
        return is_copied(self.tenant.tenant_id)


class Limits:
    """The limits of all tenants. Between `start` and `stop`, settled requests are sent to Redis and
    leases renewed. `num_gateways` returns the number of live gateways: without Redis each has its
    part of a limit.
    """

    def __init__(
        self, store: Store, clock: Clock, num_gateways: Callable[[], int] = lambda: 1
    ) -> None:
        self._store = store
        self._leases: SiteLeases | None = None
        self._num_gateways = num_gateways
        self._clock = clock
        self._accounts: dict[str, _LimitedTenant] = {}
        self._has_updates = asyncio.Event()
        self._flushing = asyncio.Lock()  # a settled lease must not be renewed afterwards
        self._background = Background()

    @property
    def num_open(self) -> int:
        """The number of open requests that hold a lease."""
        return sum(len(each.open) for each in self._accounts.values())

    @property
    def num_unsettled(self) -> int:
        return sum(len(each.unsettled) for each in self._accounts.values())

    # ── admission ────────────────────────────────────────────────────────────────────────────────

    def check(self, tenant: TenantRecord) -> None:
        """Checks the limits that need no prompt. Raises LimitIsZero or RateLimited."""
        check_zeros(tenant)
        account = self._accounts.get(tenant.tenant_id)
        if account is None or account.closed[0] != tenant.requests_per_min:
            return
        _, limit, until = account.closed
        left_s = until - self._clock.now()
        if left_s > 0:
            used = {**dict.fromkeys(RATES, 0.0), "requests_per_min": float(limit)}
            state = LimitState("requests_per_min", left_s, used, 0)
            _reject(state, {"requests_per_min": limit}, tenant)

    async def admit(
        self, tenant: TenantRecord, lease_id: str, request_cost: RequestCost = UNKNOWN_COST
    ) -> LimitLease:
        """Returns the lease of an admitted request. Raises LimitIsZero, ExceedsLimit or
        RateLimited. Does not call Redis for unlimited tenants.
        """
        self.check(tenant)
        check_size(tenant, request_cost)
        if not enforced_limits(tenant):
            return LimitLease(tenant, lease_id, request_cost, False, {})
        account = self._accounts.setdefault(tenant.tenant_id, _LimitedTenant(tenant))
        account.tenant = tenant
        return await self._open(account, lease_id, request_cost, request_cost.costs)

    async def charge(self, lease: LimitLease, request_cost: RequestCost) -> LimitLease:
        """Adds the tokens of an admitted request. Returns the lease that replaces `lease`. Raises
        ExceedsLimit or RateLimited; RateLimited ends `lease`. Does not call Redis for a tenant
        without a token limit.
        """
        check_size(lease.tenant, request_cost)
        account = self._accounts.get(lease.tenant.tenant_id)
        if account is None or not has_token_limit(lease.tenant):
            return lease
        # A separate lease, so that a refund finds either all of these tokens charged or no lease.
        lease_id, costs = f"{lease.lease_id}+tokens", {**request_cost.costs, "requests_per_min": 0}
        first = Settled(lease.lease_id, 0)
        account.open.pop(lease.lease_id, None)
        try:
            return await self._open(account, lease_id, request_cost, costs, settled=(first,))
        finally:
            self._count(account, settled=(first,))
            if account.is_copied:
                self._leave(account, first)
            else:  # again with the next command: a concurrent renewal may have restored the lease
                account.unsettled[first.lease_id] = (first, self._clock.now() + LEASE_S)

    async def _open(
        self,
        account: _LimitedTenant,
        lease_id: str,
        request_cost: RequestCost,
        costs: dict[str, int],
        *,
        settled: tuple[Settled, ...] = (),
    ) -> LimitLease:
        tenant = account.tenant
        requested = RequestedTokens(lease_id, costs)
        state = await self._decide(account, requested, settled)
        limits = self._limits_of(account)
        if state.rejected_by == (name := "requests_per_min"):
            until = self._clock.now() + state.wait_s
            account.closed = (tenant.requests_per_min or 0, limits[name], until)
        if state.rejected_by:
            _reject(state, limits, tenant)
        headers = ratelimit_headers(limits, state)
        lease = LimitLease(tenant, lease_id, request_cost, not account.is_local, headers)
        self._accounts.setdefault(tenant.tenant_id, account).open[lease_id] = lease
        return lease

    def settle(self, lease: LimitLease, num_output_tokens: int) -> None:
        """Ends the request and refunds its unused output tokens. Idempotent."""
        account = self._accounts.get(lease.tenant.tenant_id)
        if account is None or account.open.pop(lease.lease_id, None) is None:
            return
        name, costs = "output_tokens_per_min", lease.request_cost.costs
        own_costs = costs if lease.is_charged else _up_to(self._limits_of(account), costs)
        own = Settled(lease.lease_id, max(0, own_costs[name] - num_output_tokens))
        self._count(account, settled=(own,))
        # Redis has not charged requests that this gateway admitted: there is nothing to refund.
        self._leave(account, own if lease.is_charged else Settled(lease.lease_id, 0))

    async def _decide(
        self, account: _LimitedTenant, requested: RequestedTokens, settled: tuple[Settled, ...]
    ) -> LimitState:
        """Returns the state from Redis or, if it is unavailable, from the local counter, and sets
        `account.is_local`.
        """
        refund = Settled(requested.lease_id, requested.costs["output_tokens_per_min"])
        try:
            state = await self._apply(account, settled=settled, requested=requested)
        except StoreUnavailable:
            account.is_local = True
            costs = _up_to(self._limits_of(account), requested.costs)
            requested = RequestedTokens(requested.lease_id, costs)
            state = self._count(account, settled=settled, requested=requested)
            if state.rejected_by:
                self._leave(account, refund)  # Redis may have admitted the request, replying late
            elif account.is_copied and self._leases is not None:
                self._leases.open(account.tenant, requested.lease_id, replaces=_replaced(settled))
            return state
        except BaseException:
            self._leave(account, refund)
            raise
        account.is_local = False
        if not state.rejected_by:
            self._count(account, settled=settled, requested=requested, is_forced=True)
        return state

    def _count(
        self,
        account: _LimitedTenant,
        *,
        settled: tuple[Settled, ...] = (),
        requested: RequestedTokens | None = None,
        is_forced: bool = False,
    ) -> LimitState:
        """Charges the local counter, whose leases do not expire: the gateway ends them. That of
        another site's tenant always drains as its part does: a link that is cut again and again
        gives no more than one that stays cut.
        """
        limits = self._parts_of(account) if account.is_copied else self._limits_of(account)
        command = LimitCommand(limits=limits, lease_s=inf, settled=settled, asked=requested)
        return account.counter.apply(command, self._clock.now(), is_forced=is_forced)

    def _limits_of(self, account: _LimitedTenant) -> dict[str, int]:
        """Returns the limits of the last decision."""
        return self._parts_of(account) if account.is_local else enforced_limits(account.tenant)

    def _parts_of(self, account: _LimitedTenant) -> dict[str, int]:
        """Returns this gateway's part of the limits, at least one of each, since a gateway alone
        must not reject all requests.
        """
        num_parts = max(1, self._num_gateways())
        if account.is_copied:
            num_parts *= 1 + len(account.tenant.sites)
        limits = enforced_limits(account.tenant)
        return {name: max(1, limit // num_parts) for name, limit in limits.items()}

    def _leave(self, account: _LimitedTenant, settled: Settled) -> None:
        if account.is_copied:
            if self._leases is not None:
                tenant_id = account.tenant.tenant_id
                self._leases.end(tenant_id, settled.lease_id, settled.num_unused_tokens)
            return
        account.unsettled[settled.lease_id] = (settled, self._clock.now() + LEASE_S)
        self._accounts.setdefault(account.tenant.tenant_id, account)
        self._has_updates.set()

    # ── Redis ────────────────────────────────────────────────────────────────────────────────────

    def lease_from(self, lease: LeaseAtHome) -> None:
        """Leases the limits of other sites' tenants by `lease` from now on."""
        self._leases = SiteLeases(self._clock, lease)
        self._leases.start()

    def start(self) -> None:
        self._background.start_own(self._flush_endings())
        self._background.start_own(self._renew_leases())

    async def stop(self) -> None:
        """Sends the settled requests a last time. Those that cannot be sent expire with their
        leases.
        """
        await self._background.stop()
        await self.flush()
        if self._leases is not None:
            await self._leases.stop()

    async def flush(self) -> bool:
        """Sends the settled requests to Redis. Returns False if Redis is unavailable."""
        for accounts in _batches(each for each in self._accounts.values() if each.unsettled):
            sent = [list(account.unsettled)[:MAX_SETTLED] for account in accounts]
            if not await self._settle_and_renew(accounts):
                return False
            for account, lease_ids in zip(accounts, sent, strict=True):
                for lease_id in lease_ids:
                    account.unsettled.pop(lease_id, None)
                if account.unsettled:
                    self._has_updates.set()
        return True

    async def _flush_endings(self) -> None:
        while True:
            await self._has_updates.wait()
            self._has_updates.clear()
            is_flushed = False
            with failing_alone("limits_not_settled"):
                is_flushed = await self.flush()
            if not is_flushed:
                await self._clock.sleep(BREAKER_S)
                self._has_updates.set()
            self._forget()

    async def _renew_leases(self) -> None:
        while True:
            await self._clock.sleep(RENEW_S)
            with failing_alone("leases_not_renewed"):
                await self._renew()
            self._forget()

    async def _renew(self) -> None:
        for accounts in _batches(each for each in self._accounts.values() if each.open):
            if not await self._settle_and_renew(accounts, has_renewal=True):
                break

    async def _settle_and_renew(
        self, accounts: Sequence[_LimitedTenant], *, has_renewal: bool = False
    ) -> bool:
        """Sends the settled requests and renewals of several tenants in one round trip. Returns
        False if Redis is unavailable. An unreadable record of one tenant does not affect others.
        """
        ids = [each.tenant.tenant_id for each in accounts]
        keys = [key for each in ids for key in (meter_of(each), open_requests_of(each))]
        async with self._flushing:
            commands = [
                _command(each, renewed=tuple(each.open) if has_renewal else ()) for each in accounts
            ]
            try:
                reply = await self._store.evaluate(APPLY_EACH_LUA, keys, [_encode(commands)])
                with reading_reply():
                    failed = [(ids[index], reason.decode()) for index, reason in reply]
            except StoreUnavailable:
                return False
        for tenant_id, reason in failed:
            log.error("limits_unreadable", tenant_id=tenant_id, error=reason)
        return True

    async def _apply(
        self,
        account: _LimitedTenant,
        *,
        settled: tuple[Settled, ...],
        requested: RequestedTokens,
    ) -> LimitState:
        """Sends the request, `settled` and older settled requests. Returns the state. Raises
        StoreUnavailable.
        """
        tenant_id = account.tenant.tenant_id
        if account.is_copied:
            return await self._lease(account, settled, requested)
        keys = [meter_of(tenant_id), open_requests_of(tenant_id)]
        async with account.calls:
            command = _command(account, settled=settled, requested=requested)
            try:
                reply = await self._store.evaluate(APPLY_LUA, keys, [_encode(command)])
                with reading_reply():
                    return to_limit_state(reply)
            except StoreRejected as error:
                log.error("limits_unreadable", tenant_id=tenant_id, error=error.message)
                raise

    async def _lease(
        self, account: _LimitedTenant, settled: tuple[Settled, ...], requested: RequestedTokens
    ) -> LimitState:
        """Charges a request to this gateway's share. Raises StoreUnavailable."""
        if self._leases is None:
            raise StoreUnavailable("this site has no links")
        costs = {**requested.costs, "concurrency": 0 if settled else 1}
        replaced = _replaced(settled)
        return await self._leases.admit(
            account.tenant, requested.lease_id, costs, replaces=replaced
        )

    def _forget(self) -> None:
        """Removes settled requests whose leases have expired in Redis, and idle tenants."""
        now = self._clock.now()
        for tenant_id, account in list(self._accounts.items()):
            for lease_id, (_, over_at) in list(account.unsettled.items()):
                if over_at <= now:
                    del account.unsettled[lease_id]
            if not account.open and not account.unsettled and account.counter.is_idle(now):
                del self._accounts[tenant_id]


def _batches(accounts: Iterable[_LimitedTenant]) -> list[list[_LimitedTenant]]:
    """Returns the accounts of this site's tenants."""
    found = [each for each in accounts if not each.is_copied]
    return [found[first : first + MAX_TENANTS] for first in range(0, len(found), MAX_TENANTS)]


def _command(
    account: _LimitedTenant,
    *,
    settled: tuple[Settled, ...] = (),
    renewed: tuple[str, ...] = (),
    requested: RequestedTokens | None = None,
) -> LimitCommand:
    """Returns a command for Redis with the account's unsettled requests."""
    unsettled = (each for each, _ in islice(account.unsettled.values(), MAX_SETTLED))
    return LimitCommand(
        limits=enforced_limits(account.tenant),
        lease_s=LEASE_S,
        settled=(*settled, *unsettled),
        renewed=renewed,
        asked=requested,
    )


def _replaced(settled: tuple[Settled, ...]) -> str:
    """Returns the lease whose place a request takes, or ""."""
    return settled[0].lease_id if settled else ""


def _up_to(limits: dict[str, int], costs: dict[str, int]) -> dict[str, int]:
    """Returns the costs, each cut to the most that an empty meter admits."""
    return {name: min(cost, limits.get(name, cost)) for name, cost in costs.items()}


def _reject(state: LimitState, limits: dict[str, int], tenant: TenantRecord) -> NoReturn:
    """Raises the error of the limits that decided."""
    name, limit = state.rejected_by, limits[state.rejected_by]
    used = state.num_open if name == "concurrency" else round(state.used[name])
    full = getattr(tenant, name)
    part = "" if limit == full else f"this gateway's part {limit} of "
    raise EXHAUSTED[name](
        f"{part}this tenant's limit {name} of {full} is "
        f"reached ({used} used); retry in {max(state.wait_s, 0.001):.3f} s",
        retry_after_s=state.wait_s,
        headers=ratelimit_headers(limits, state),
    )
