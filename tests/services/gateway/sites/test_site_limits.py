"""The limits of a tenant that several sites serve, in virtual time: how far they are exceeded."""

from __future__ import annotations

import asyncio
import random
from itertools import accumulate
from typing import Any

import pytest

from services.gateway.sites.home_accounts import HomeAccounts
from services.gateway.tenancy.errors import ConcurrencyExhausted, RateLimited
from services.gateway.tenancy.limits import Limits
from services.gateway.tenancy.request_cost import LimitLease, RequestCost
from shared.errors import NoResponders
from shared.messages import LeaseLimits, LeaseState, LeaseStep
from shared.tenancy.leases.lease_table import GIVEN_BACK_S
from shared.tenancy.leases.rates import MINUTE_S
from shared.tenancy.rate_limit import LEASE_S, enforced_limits
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
        self.one_way_s = 0.0
        self.num_steps = 0
        self.at_home = Limits(self.store, self.clock)
        self.copied = TenantRecord(tenant_id="a/team", sites=NAMES, **limits)
        self.elsewhere = {name: self._site(name) for name in NAMES}

    def _site(self, name: str) -> Limits:
        async def lease(tenant_id: str, step: LeaseStep) -> LeaseState:
            self.num_steps += 1
            await asyncio.sleep(self.one_way_s)
            if name in self.cut:
                raise NoResponders("cut")
            command = LeaseLimits(gateway_id=f"{name}/gateway", tenant_id="team", step=step)
            reply = await self.accounts.lease(self.record, command)
            await asyncio.sleep(self.one_way_s)
            return reply.state

        limits = Limits(MemoryStore(), self.clock)
        limits.lease_from(lease)
        return limits

    async def admit(self, site: str, lease_id: str, num_tokens: int = 1) -> LimitLease:
        cost = RequestCost(1, num_tokens)
        if site == "a":
            return await self.at_home.admit(self.record, lease_id, cost)
        return await self.elsewhere[site].admit(self.copied, lease_id, cost)

    async def admit_and_charge(self, site: str, lease_id: str, num_tokens: int) -> LimitLease:
        """As a request whose body is read after its admission."""
        limits = self.elsewhere[site]
        lease = await limits.admit(self.copied, lease_id)
        return await limits.charge(lease, RequestCost(1, num_tokens))

    def unspent(self, site: str) -> int:
        """Returns what a site may still spend of the first limit without asking."""
        leases = self.elsewhere[site]._leases
        assert leases is not None
        share = leases._accounts["a/team"].share
        return share._pools()[next(iter(enforced_limits(self.record)))]

    async def admit_soon(self, site: str, lease_id: str, num_tokens: int) -> float:
        """Retries until the request is admitted. Returns the time that it took."""
        start = self.clock.now()
        while True:
            try:
                await self.admit(site, lease_id, num_tokens)
                return self.clock.now() - start
            except RateLimited as error:
                await asyncio.sleep(error.retry_after_s)

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


def test_share_of_a_limit_is_spent_without_a_round_trip() -> None:
    """Only the first request waits for the home, at 100 ms; the others find their share."""

    async def scenario() -> None:
        world = World(requests_per_min=600, output_tokens_per_min=6000, concurrency=20)
        world.one_way_s = 0.05
        waits = []
        for number in range(40):
            before = world.clock.now()
            lease = await world.admit_and_charge("b", f"r{number}", 20)
            waits.append(world.clock.now() - before)
            assert lease.is_charged
            await asyncio.sleep(0.2)
            world.settle("b", lease, 20)
        assert waits[0] <= 0.2001 and max(waits[1:]) == 0.0, waits
        assert world.num_steps < 40, "several requests share a step"

    run(scenario())


@pytest.mark.parametrize("limit", [{"requests_per_min": 10}, {"concurrency": 10}])
def test_site_alone_has_the_whole_limit(limit: dict[str, int]) -> None:
    async def scenario() -> None:
        world = World(**limit)
        for number in range(10):
            await world.admit("b", f"r{number}")
        with pytest.raises(RateLimited, match=f"limit {next(iter(limit))} of 10 is reached"):
            await world.admit("b", "one more")

    run(scenario())


def test_what_one_site_holds_unspent_goes_to_the_site_that_needs_it() -> None:
    async def scenario() -> None:
        world = World(requests_per_min=40)
        for number in range(4):
            await world.admit("b", f"r{number}")
            await asyncio.sleep(0.01)
        held, num_admitted = world.unspent("b"), 0
        assert held > 0
        try:
            while True:
                await world.admit("c", f"s{num_admitted}")
                num_admitted += 1
        except RateLimited as error:
            assert num_admitted == 36 - held
            assert error.retry_after_s <= GIVEN_BACK_S, "what b holds comes back"
        await asyncio.sleep(GIVEN_BACK_S + 0.6)
        assert world.unspent("b") == 0
        for number in range(held):
            await world.admit("c", f"t{number}")

    run(scenario())


def test_unused_share_comes_back_from_a_site_that_is_gone() -> None:
    """It counts as spent when its term ends, and drains from then on."""

    async def scenario() -> None:
        world = World(output_tokens_per_min=600)
        await world.admit("b", "first", 60)
        held = 60 + world.unspent("b")
        world.cut = {"b"}
        await asyncio.sleep(LEASE_S - 1.0)
        with pytest.raises(RateLimited):
            await world.admit("a", "too early", 600 - held + 1)
        await asyncio.sleep(1.5 + held * MINUTE_S / 600)
        assert await world.admit("a", "whole", 600)

    run(scenario())


def test_share_is_spent_while_the_link_is_cut_and_the_part_after_it() -> None:
    async def scenario() -> None:
        world = World(requests_per_min=60)
        for number in range(6):
            await world.admit("b", f"r{number}")
            await asyncio.sleep(0.1)
        held = world.unspent("b")
        world.cut = {"b", "c"}
        leases = [await world.admit("b", f"s{number}") for number in range(held)]
        assert all(each.is_charged for each in leases), "the home has subtracted them"
        assert held > 0 and world.unspent("b") == 0
        await asyncio.sleep(10.0)
        lease = await world.admit("b", "of its part")
        assert not lease.is_charged and lease.headers["x-ratelimit-limit-requests"] == "20"
        world.cut = set()
        again = await world.admit("b", "the link is back")
        assert again.is_charged

    run(scenario())


def test_requests_at_once_ask_together() -> None:
    async def scenario() -> None:
        world = World(output_tokens_per_min=1000)
        world.one_way_s = 0.05
        admitting = [world.admit("b", f"r{number}", 20) for number in range(60)]
        found = await asyncio.gather(*admitting, return_exceptions=True)
        leases = [each for each in found if isinstance(each, LimitLease)]
        assert len(leases) == 50 and world.num_steps <= 3
        for lease in leases:
            world.settle("b", lease, 4)
        assert await world.admit_soon("a", "what they did not use", 700) < 5.0

    run(scenario())


def test_request_that_stops_waiting_for_the_home_costs_nothing() -> None:
    async def scenario() -> None:
        world = World(requests_per_min=1, concurrency=1)
        world.one_way_s = 0.05
        admitting = asyncio.create_task(world.admit("b", "gone"))
        await asyncio.sleep(0.02)
        admitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await admitting
        await asyncio.sleep(0.1)
        assert await world.admit("b", "next")

    run(scenario())
