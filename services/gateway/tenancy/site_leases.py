"""This gateway's shares of the limits of other sites' tenants: asks their homes, and reports.

A request that a share covers waits for nobody. One that no share covers asks the home before it is
rejected; those that come meanwhile ask together, in one step. A share is renewed, refilled ahead of
need and given back in the background.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from shared.background import Background, failing_alone, is_logged
from shared.clock import Clock
from shared.errors import HearthError
from shared.messages import MAX_ASKED, LeaseState, LeaseStep
from shared.store import StoreUnavailable
from shared.tenancy.leases.limit_share import LimitShare
from shared.tenancy.rate_limit import LEASE_S, LimitState, enforced_limits
from shared.tenancy.tenant import TenantRecord

TICK_S = 0.5

# Runs one step of a share at the home of another site's tenant. Raises a HearthError.
LeaseAtHome = Callable[[str, LeaseStep], Awaitable[LeaseState]]


@dataclass(slots=True)
class _WaitingLease:
    lease_id: str
    costs: Mapping[str, int]
    replaces: str
    verdict: asyncio.Future[LimitState]


@dataclass(slots=True)
class _LeasingTenant:
    tenant: TenantRecord
    share: LimitShare
    waiting: deque[_WaitingLease] = field(default_factory=deque)
    is_asking: bool = False

    @property
    def limits(self) -> dict[str, int]:
        return enforced_limits(self.tenant)


class SiteLeases:
    def __init__(self, clock: Clock, lease: LeaseAtHome) -> None:
        self._clock = clock
        self._lease = lease
        self._accounts: dict[str, _LeasingTenant] = {}
        self._background = Background()

    def start(self) -> None:
        self._background.start_own(self._run())

    async def stop(self) -> None:
        """Gives all shares back to the homes that answer."""
        await self._background.stop()
        for each in self._accounts.values():
            each.share.give_back()
        held = [each for each in self._accounts.values() if not each.share.is_empty]
        await asyncio.gather(*map(self._step, held))

    async def admit(
        self, tenant: TenantRecord, lease_id: str, costs: Mapping[str, int], *, replaces: str = ""
    ) -> LimitState:
        """Returns the state after a request, which takes the place of an open one if it `replaces`
        it. Raises StoreUnavailable if the home does not decide.
        """
        account, now = self._account(tenant, lease_id), self._clock.now()
        if not account.waiting and account.share.covers(costs, account.limits, now):
            account.share.spend(lease_id, costs, now, replaces=replaces)
            if account.share.is_low(account.limits, now):
                self._ask(account)
            return self._state(account)
        verdict = asyncio.get_running_loop().create_future()
        account.waiting.append(_WaitingLease(lease_id, costs, replaces, verdict))
        self._ask(account)
        return await verdict

    def open(self, tenant: TenantRecord, lease_id: str, *, replaces: str = "") -> None:
        """Counts an open request that the home has not admitted."""
        self._account(tenant, lease_id).share.open(lease_id, replaces=replaces)

    def end(self, tenant_id: str, lease_id: str, num_unused_tokens: int) -> None:
        """Ends a request, and takes back output tokens that it did not use. Idempotent."""
        account = self._accounts.get(tenant_id)
        if account is not None:
            account.share.end(lease_id, num_unused_tokens)
            if account.share.has_excess(account.limits, self._clock.now()):
                self._ask(account)

    def _account(self, tenant: TenantRecord, lease_id: str) -> _LeasingTenant:
        account = self._accounts.get(tenant.tenant_id)
        if account is None:
            account = _LeasingTenant(tenant, LimitShare(lease_id, LEASE_S))
            self._accounts[tenant.tenant_id] = account
        account.tenant = tenant
        return account

    def _state(
        self, account: _LeasingTenant, rejected_by: str = "", wait_s: float = 0.0
    ) -> LimitState:
        share = account.share
        used = share.used(account.limits, self._clock.now())
        return LimitState(rejected_by, wait_s, used, share.num_open_everywhere)

    # ── the home ─────────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        while True:
            await self._clock.sleep(TICK_S)
            with failing_alone("shares_not_renewed"):
                self._renew()

    def _renew(self) -> None:
        now = self._clock.now()
        for tenant_id, account in list(self._accounts.items()):
            if account.share.is_due(account.limits, now):
                self._ask(account)
            elif account.share.is_empty and not account.is_asking:
                del self._accounts[tenant_id]

    def _ask(self, account: _LeasingTenant) -> None:
        if not account.is_asking:
            account.is_asking = True
            self._background.start_item(self._exchange(account), is_logged)

    async def _exchange(self, account: _LeasingTenant) -> None:
        """Runs steps until nobody waits, and nothing is held that others need."""
        try:
            while await self._step(account):
                has_excess = account.share.has_excess(account.limits, self._clock.now())
                if not account.waiting and not has_excess:
                    break
        finally:
            account.is_asking = False

    async def _step(self, account: _LeasingTenant) -> bool:
        """Runs one step. Returns False if the home does not answer: nobody waits for it then."""
        limits = account.limits
        asked = [account.waiting.popleft() for _ in range(min(MAX_ASKED, len(account.waiting)))]
        asked = [each for each in asked if not each.verdict.done()]
        step = account.share.step([each.costs for each in asked], limits, self._clock.now())
        try:
            state = await self._lease(account.tenant.tenant_id, step)
            is_taken = account.share.take(step, state, self._clock.now())
            _check(state, len(asked), limits, is_taken=is_taken)
        except HearthError as error:
            account.share.release()
            reason = f"the home site does not decide: {error.message}"
            _fail([*asked, *account.waiting], reason)
            account.waiting.clear()
            return False
        except BaseException:  # ends the exchange too: nobody would answer those that wait
            _fail([*asked, *account.waiting], "the step to the home site failed")
            account.waiting.clear()
            raise
        for each, (rejected_by, wait_s) in zip(asked, state.rejections, strict=True):
            if each.verdict.done():
                continue
            if not rejected_by:
                now = self._clock.now()
                account.share.spend(each.lease_id, each.costs, now, replaces=each.replaces)
            each.verdict.set_result(self._state(account, rejected_by, wait_s))
        return True


def _check(state: LeaseState, num_asked: int, limits: Mapping[str, int], *, is_taken: bool) -> None:
    """Raises StoreUnavailable for a state that decides nothing."""
    if not is_taken or len(state.rejections) != num_asked:
        raise StoreUnavailable("the share has ended")
    for name, _ in state.rejections:
        if name and name not in limits:
            raise StoreUnavailable(f"the home has a limit {name!r}, its copy has none")


def _fail(waiting: list[_WaitingLease], reason: str) -> None:
    for each in waiting:
        if not each.verdict.done():
            each.verdict.set_exception(StoreUnavailable(reason))
