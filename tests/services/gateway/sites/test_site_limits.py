"""The limits of a tenant that several sites serve, in virtual time: how far they are exceeded."""

from __future__ import annotations

import asyncio
import random
from itertools import accumulate
from typing import Any

import pytest

from services.gateway.sites.home_accounts import HomeAccounts
from services.gateway.sites.limit_steps import state_of, step_of
from services.gateway.tenancy.errors import ConcurrencyExhausted, RateLimited
from services.gateway.tenancy.limits import Limits
from services.gateway.tenancy.request_cost import LimitLease, RequestCost
from shared.errors import NoResponders
from shared.tenancy.rate_limit import MINUTE_S, LimitCommand, LimitState
from shared.tenancy.tenant import TenantRecord
from tests.support.world.clock import VirtualClock, run
from tests.support.world.store import MemoryStore

NAMES = ("b", "c")
LIMIT = 300  # output tokens a minute
NUM_SITES = 1 + len(NAMES)
PART = LIMIT // NUM_SITES


class World:
    """The home of a tenant, and two sites over links that can be cut."""

    def __init__(self, **limits: int) -> None:
        self.clock = VirtualClock()
        self.record = TenantRecord(tenant_id="team", sites=NAMES, **limits)
        self.store = MemoryStore()
        self.accounts = HomeAccounts(self.store, lambda: 0.0, gateway_id="a/gateway")
        self.cut: set[str] = set()
        self.at_home = Limits(self.store, self.clock)
        self.copied = TenantRecord(tenant_id="a/team", sites=NAMES, **limits)
        self.elsewhere = {name: self._site(name) for name in NAMES}

    def _site(self, name: str) -> Limits:
        async def decide(tenant_id: str, command: LimitCommand) -> LimitState:
            if name in self.cut:
                raise NoResponders("cut")
            step = step_of(f"{name}/gateway", tenant_id, command)
            return state_of(await self.accounts.apply(self.record, name, step))

        limits = Limits(MemoryStore(), self.clock)
        limits.decide_at_home(decide)
        return limits

    async def admit(self, site: str, lease_id: str, num_tokens: int = 1) -> LimitLease:
        cost = RequestCost(1, num_tokens)
        if site == "a":
            return await self.at_home.admit(self.record, lease_id, cost)
        return await self.elsewhere[site].admit(self.copied, lease_id, cost)

    def settle(self, site: str, lease: LimitLease, num_tokens: int) -> None:
        limits = self.at_home if site == "a" else self.elsewhere[site]
        limits.settle(lease, num_tokens)


def most_in_any_window(admitted: list[tuple[float, int]], per_s: float) -> float:
    """Returns the largest sum of admitted tokens in any window, less `per_s` times its length."""
    sums = [0, *accumulate(amount for _, amount in admitted)]
    lowest, most = 0.0, 0.0
    for index, (at, _) in enumerate(admitted):
        lowest = min(lowest, sums[index] - per_s * at)
        most = max(most, sums[index + 1] - per_s * at - lowest)
    return most


def test_most_in_any_window() -> None:
    assert most_in_any_window([(0.0, 5), (1.0, 5), (100.0, 7)], 1.0) == 9.0


async def _flood(seed: int, *, cuts: bool) -> list[tuple[float, int]]:
    """Every site asks for far more than the limit, for five minutes. Returns what was admitted."""
    source, world = random.Random(seed), World(output_tokens_per_min=LIMIT)
    every = (world.at_home, *world.elsewhere.values())
    for limits in every:
        limits.start()
    admitted: list[tuple[float, int]] = []
    eager = [source.choice((0.2, 1.0, 1.0)) for _ in range(NUM_SITES)]
    for number in range(600):
        await asyncio.sleep(0.5)
        if cuts and source.random() < 0.1:
            world.cut ^= {source.choice(NAMES)}
        for site, share in zip("abc", eager, strict=True):
            if source.random() >= share:
                continue
            num_tokens = source.randrange(1, 40)
            try:
                lease = await world.admit(site, f"{site}{number}", num_tokens)
            except RateLimited:
                continue
            used = source.choice((num_tokens, num_tokens // 2))
            world.settle(site, lease, used)
            admitted.append((world.clock.now(), used))
    for limits in every:
        await limits.stop()
    return admitted


@pytest.mark.parametrize("seed", range(3))
def test_limit_is_exact_while_links_stand(seed: int) -> None:
    """As at one site: the limit at once, and then as much a minute."""
    admitted = run(_flood(seed, cuts=False))
    most = most_in_any_window(admitted, LIMIT / MINUTE_S)
    assert 0.9 * LIMIT < most <= LIMIT + 0.001


@pytest.mark.parametrize("seed", range(6))
def test_cut_link_adds_at_most_the_part_of_its_site(seed: int) -> None:
    """However often links are cut: the limit, and for each other site its part."""
    admitted = run(_flood(seed, cuts=True))
    bound = LIMIT + len(NAMES) * PART
    most = most_in_any_window(admitted, bound / MINUTE_S)
    assert most <= bound + 0.001
    assert sum(amount for _, amount in admitted) > 5 * LIMIT, "a cut site goes on with its part"


def test_open_requests_of_all_sites_count_together() -> None:
    async def scenario() -> None:
        world = World(concurrency=6)
        names = [(site, f"r{number}") for number in range(2) for site in "abc"]
        leases: list[Any] = [await world.admit(*each) for each in names]
        for site in "abc":
            with pytest.raises(ConcurrencyExhausted, match="limit concurrency of 6"):
                await world.admit(site, "one more")
        world.settle("b", leases[1], 1)
        await world.elsewhere["b"].flush()
        await asyncio.sleep(0.01)
        assert await world.admit("c", "next")
        world.cut = {"c"}
        with pytest.raises(ConcurrencyExhausted, match="part 2 of this tenant's limit concurrency"):
            await world.admit("c", "beyond its part")
        with pytest.raises(ConcurrencyExhausted, match="6 used"):
            await world.admit("a", "what c has still counts")

    run(scenario())


def test_home_with_a_limit_that_the_copy_lacks_does_not_decide() -> None:
    """Its record is newer than the copy, or the home is hostile."""

    async def scenario() -> None:
        world = World(requests_per_min=6)
        world.record = TenantRecord(tenant_id="team", sites=NAMES, concurrency=1)
        await world.admit("a", "first")
        lease = await world.admit("b", "second")
        assert not lease.is_charged and lease.headers["x-ratelimit-limit-requests"] == "2"

    run(scenario())


def test_requests_that_settle_meanwhile_follow_in_one_message() -> None:
    async def scenario() -> None:
        world, num_sent = World(output_tokens_per_min=1000), 0
        site = world.elsewhere["b"]
        decide = site._decide_at_home
        assert decide is not None

        async def slowly(tenant_id: str, command: LimitCommand) -> LimitState:
            nonlocal num_sent
            num_sent += 1
            await asyncio.sleep(0.1)
            return await decide(tenant_id, command)

        leases = [await world.admit("b", f"r{number}", 10) for number in range(50)]
        site.decide_at_home(slowly)
        site.start()
        for lease in leases:
            world.settle("b", lease, 4)
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.5)
        assert site.num_unsettled == 0 and num_sent == 2
        state = await world.accounts.apply(
            world.record, "b", step_of("b/gateway", "a/team", LimitCommand(limits={}, lease_s=1.0))
        )
        assert state.used["output_tokens_per_min"] == pytest.approx(50 * 4, abs=15)
        await site.stop()

    run(scenario())
