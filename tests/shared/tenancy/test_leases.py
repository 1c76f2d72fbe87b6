"""Shares of limits and their home, when steps and replies get lost, come late, or come twice."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shared.messages import LeaseState, LeaseStep
from shared.tenancy.leases.lease_table import MAX_HOLDERS
from shared.tenancy.leases.limit_share import IDLE_S, LimitShare
from shared.tenancy.leases.rates import MINUTE_S
from shared.tenancy.rate_limit import LimitCommand, RateLimitCounter

LIMIT, NUM_SLOTS, TERM_S = 120, 8, 15.0
NAME = "output_tokens_per_min"
LIMITS = {NAME: LIMIT, "concurrency": NUM_SLOTS}


def leased(home: RateLimitCounter, holder: str, step: LeaseStep, now: float) -> LeaseState:
    command = LimitCommand(limits=LIMITS, lease_s=TERM_S, holder=holder, leased=step)
    state = home.apply(command, now).leased
    assert state is not None
    return state


class Sites:
    """A home and three sites. `used` is the meter of what has truly been spent, when it was."""

    def __init__(self, seed: int) -> None:
        self.source, self.now = random.Random(seed), 100.0
        self.home = RateLimitCounter()
        self.shares = {f"{name}/g": LimitShare(f"{name}0", TERM_S) for name in "bcd"}
        self.used, self.num_spent, self.num_requests = 0.0, 0, 0
        self.open: dict[str, list[tuple[str, int]]] = {name: [] for name in self.shares}
        self.late: list[tuple[str, LeaseStep]] = []

    def pass_time(self) -> None:
        elapsed_s = self.source.choice((0.0, 0.0, 0.3, 2.0, 5.0, 20.0))
        self.now += elapsed_s
        self.used = max(0.0, self.used - elapsed_s * LIMIT / MINUTE_S)

    def try_spend(self, holder: str) -> None:
        cost = self.source.randrange(1, 30)
        costs = {NAME: cost, "concurrency": 1}
        share = self.shares[holder]
        if not share.covers(costs, LIMITS, self.now):
            self.exchange(holder, costs)
        elif self.source.random() < 0.8:
            self.spend(holder, cost, costs)

    def spend(self, holder: str, cost: int, costs: dict[str, int]) -> None:
        name = f"r{self.num_requests}"
        self.num_requests += 1
        self.shares[holder].spend(name, costs, self.now)
        self.open[holder].append((name, cost))
        self.used += cost
        self.num_spent += cost

    def check(self) -> None:
        unspent = sum(
            share._pools()[NAME] for share in self.shares.values() if self.now < share._ends_at
        )
        assert self.used + unspent <= LIMIT + 1e-6, "more than the limit may be spent"
        held = self.home.apply(LimitCommand(limits=LIMITS, lease_s=TERM_S), self.now).used[NAME]
        assert self.used + unspent <= held + 1e-6, "the home has lost sight of some"

    def end(self, holder: str) -> None:
        if self.open[holder]:
            name, cost = self.open[holder].pop(0)
            unused = self.source.randrange(cost + 1)
            if name in self.shares[holder]._charged:
                self.used = max(0.0, self.used - unused)
            self.shares[holder].end(name, unused)

    def exchange(self, holder: str, asked: dict[str, int] | None = None) -> None:
        share = self.shares[holder]
        step = share.step([asked] if asked else [], LIMITS, self.now)
        fate = self.source.random()
        if fate < 0.15:
            self.late.append((holder, step))
        elif fate < 0.3:
            leased(self.home, holder, step, self.now)  # the reply is lost
            self.late.append((holder, step))
        else:
            state = leased(self.home, holder, step, self.now)
            between = [self.try_local, self.end, lambda _: None]
            self.source.choice(between)(holder)
            assert share.take(step, state, self.now)
            if asked and not state.rejections[0][0]:
                self.spend(holder, asked[NAME], asked)
            return
        self.try_local(holder)
        share.release()

    def try_local(self, holder: str) -> None:
        """Spends while a step is under way."""
        costs = {NAME: self.source.randrange(1, 12), "concurrency": 1}
        if self.shares[holder].covers(costs, LIMITS, self.now):
            self.spend(holder, costs[NAME], costs)

    def deliver_late(self, _: str) -> None:
        if self.late:
            holder, step = self.late.pop(self.source.randrange(len(self.late)))
            leased(self.home, holder, step, self.now)


@pytest.mark.parametrize("seed", range(12))
def test_sites_never_spend_more_than_the_limit_whatever_gets_lost(seed: int) -> None:
    sites = Sites(seed)
    for _ in range(1500):
        holder = sites.source.choice(list(sites.shares))
        weights = {sites.try_spend: 6, sites.end: 5, sites.exchange: 2, sites.deliver_late: 1}
        sites.source.choices(list(weights), list(weights.values()))[0](holder)
        sites.check()
        if sites.source.random() < 0.2:
            sites.pass_time()
    assert sites.num_spent > 10 * LIMIT, "the limit is spent, too"


def step_of(number: int, **parts: Any) -> LeaseStep:
    return LeaseStep(lease_id=parts.pop("lease_id", "s"), number=number, **parts)


def test_home_believes_no_holder_that_claims_more_than_it_has() -> None:
    home = RateLimitCounter()
    first = leased(home, "b/g", step_of(1, asked=({NAME: 50},)), 0.0)
    assert (first.rejections[0][0], first.pool[NAME]) == ("", 50)
    greedy = step_of(2, pool={NAME: 1000, "concurrency": 99}, num_refunded=1000)
    second = leased(home, "b/g", greedy, 0.0)
    assert second.pool == {NAME: 50, "concurrency": 0}
    other = leased(home, "c/g", step_of(1, asked=({NAME: 71},)), 0.0)
    assert other.rejections[0][0] == NAME, "nothing was given back"
    again = leased(home, "b/g", step_of(3, spent={NAME: 10_000}), 0.0)
    assert again.pool[NAME] == 0 and again.used[NAME] == 50


def test_holder_takes_no_more_than_it_has_reported_and_asked_for() -> None:
    """A contended share is given back step by step: one that the home fills again has no end."""
    share = LimitShare("b0", TERM_S)
    lie = LeaseState(pool={NAME: 10**6, "concurrency": 99}, used={}, num_open=0, is_contended=True)
    for asked, num_held in (([{NAME: 5, "concurrency": 1}], 5 + LIMIT // 16), ([], 0)):
        step = share.step(asked, LIMITS, 0.0)
        assert share.take(step, lie, 0.0)
        assert share._pools()[NAME] == num_held
        assert share.has_excess(LIMITS, 0.0) == bool(num_held)


def test_more_holders_than_a_tenant_may_have_get_nothing() -> None:
    home = RateLimitCounter()
    for number in range(MAX_HOLDERS):
        assert leased(home, f"b/{number}", step_of(1, asked=({NAME: 1},)), 0.0).rejections
    state = leased(home, "b/more", step_of(1, asked=({NAME: 1},)), 0.0)
    assert (state.pool, state.rejections) == ({}, ())


def test_unused_share_is_given_back() -> None:
    home, share = RateLimitCounter(), LimitShare("b0", TERM_S)
    costs, now = {NAME: 10, "concurrency": 1}, 0.0
    for name in ("first", "second"):
        step = share.step([costs], LIMITS, now)
        share.take(step, leased(home, "b/g", step, now), now)
        share.spend(name, costs, now)
        share.end(name, 0)
    assert share.covers(costs, LIMITS, now)
    now += IDLE_S
    assert share.is_due(LIMITS, now)
    step = share.step([], LIMITS, now)
    share.take(step, leased(home, "b/g", step, now), now)
    assert share.is_empty and not share.is_due(LIMITS, now + 1)
    assert home.apply(LimitCommand(limits=LIMITS, lease_s=1.0), now + 5).used[NAME] == 0
