"""Sites drop what they hold of a tenant that has left them, whoever was away when ordered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.gateway.sites.linked_homes import LinkedHomes
from services.gateway.sites.site_withdrawals import MAX_PER_S, SiteWithdrawals
from services.gateway.tenancy.usage_counter import day_of
from shared.errors import InvalidRequest
from shared.messages import Done, SiteState, WithdrawTenant
from shared.regions.region_classes import region_classes
from shared.subjects import STATES_OF_SITES, at_site, from_sites, state_to_sites
from shared.tenancy.declared_classes import declare_classes
from shared.tenancy.deletion import kv_drops, site_drops
from shared.tenancy.deletion.tenant_removal import TenantRemoval, TenantWithdrawal
from shared.tenancy.site_usage import is_usage_deleted
from shared.tenancy.tenant import usage_of
from shared.tenancy.tenant_admin import TenantAdmin
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import run
from tests.support.world.links import Link, LinkedNetworks
from tests.support.world.process import ProcessClock
from tests.support.world.store import MemoryStore, ProcessStore

REGIONS = {"a": "fr", "b": "us", "c": "jp"}
CLASSES = region_classes(["eu=fr,de"])
STATE_S = 1.0
SOON_S = 6.0  # a site that was silent is heard, and what was ordered has come


class Gateway:
    """The part of a gateway that withdraws. `num_asked` counts what it gets from other sites."""

    def __init__(self, network: SimulatedNetwork, store: MemoryStore, site: str, name: str) -> None:
        self._site, self.num_asked = site, 0
        self.bus = network.bus(name)
        self.process = self.bus.process
        self._clock = ProcessClock(self.process)
        self.store = ProcessStore(store, self.process)
        self._homes = LinkedHomes(self.bus, self._clock, lambda site: None)
        self.withdrawals = SiteWithdrawals(
            self._homes,
            self._clock,
            self.store,
            CLASSES,
            TenantWithdrawal(self.store, store.now),
            gateway_id=at_site(site, name),
            region=REGIONS[site],
        )
        self.withdrawn: list[tuple[str, bool]] = []
        self.withdrawals.on_withdrawn = lambda *each: self.withdrawn.append(each)

    async def start(self) -> None:
        self.process.start(self._run())
        await asyncio.sleep(0)

    async def _run(self) -> None:
        subject = from_sites("gateway", self.bus.process_id, "tenants")
        await self.bus.serve(subject, WithdrawTenant, self._answer)
        await self.bus.subscribe(STATES_OF_SITES, SiteState, self._homes.observe)
        await asyncio.gather(self._report(), self.withdrawals.run())

    async def _answer(self, command: WithdrawTenant) -> Done:
        self.num_asked += 1
        return await self.withdrawals.answer(command)

    async def _report(self) -> None:
        name, own = at_site(self._site, self.bus.process_id), self.bus.process_id
        for number in range(1_000_000):
            state = SiteState(
                gateway_id=name, epoch=1, sequence_number=number, region=REGIONS[self._site]
            )
            await self.bus.publish(state_to_sites(own), state)
            await self._clock.sleep(STATE_S)


class Sites:
    """Site a is linked to b and to c; each has a gateway."""

    def __init__(self) -> None:
        networks = {name: SimulatedNetwork() for name in REGIONS}
        pairs = [("a", "b"), ("a", "c")]
        self.linked = LinkedNetworks(networks, REGIONS, delay_s=0.02, pairs=pairs)
        self.stores = {name: MemoryStore() for name in REGIONS}
        self.gateways: dict[str, list[Gateway]] = {name: [] for name in REGIONS}
        self.admin = TenantAdmin(self.stores["a"], self.stores["a"].now)
        self._names = iter(range(100))

    async def start(self) -> None:
        await self.admin.add("acme", {}, "key")
        for site in REGIONS:
            await self.add_gateway(site)
        await asyncio.sleep(SOON_S)

    async def add_gateway(self, site: str) -> Gateway:
        network, name = self.linked.networks[site], f"gateway-{next(self._names)}"
        gateway = Gateway(network, self.stores[site], site, name)
        self.gateways[site].append(gateway)
        await gateway.start()
        return gateway

    def kill(self, site: str) -> None:
        """Kills all gateways of a site."""
        for each in self.gateways[site]:
            self.linked.networks[site].disconnect(each.bus.process_id)
            each.process.die()
        self.gateways[site].clear()

    @property
    def link(self) -> Link:
        return self.linked.link("a", "b")

    async def allow(self, *regions: str) -> None:
        await self.admin.change("acme", {"allowed_regions": regions})

    async def ordered(self, site: str) -> list[str]:
        """Returns the tenants that a site has had dropped."""
        return [tenant_id for tenant_id, _ in await self.kept(site)]

    async def kept(self, site: str) -> list[tuple[str, tuple[str, ...] | None]]:
        """Returns the tenants that a site has had dropped, and the regions that keep theirs."""
        found = await kv_drops.orders(self.stores[site])
        return [(each.drop.tenant_id, each.drop.kept_regions) for each in found]

    async def positions(self) -> dict[str, int]:
        """Returns how many of the orders each site has confirmed."""
        numbers = [each.drop.number for each in await kv_drops.orders(self.stores["a"])]
        found = await site_drops.positions(self.stores["a"])
        return {site: sum(each <= last for each in numbers) for site, last in found.items()}


def scenario(test: Callable[[Sites], Awaitable[None]]) -> None:
    async def main() -> None:
        sites = Sites()
        await sites.start()
        await test(sites)
        for site in REGIONS:
            sites.kill(site)

    run(main())


def test_a_site_that_the_tenant_leaves_drops_it_within_a_heartbeat() -> None:
    async def test(sites: Sites) -> None:
        await sites.allow("fr", "jp")
        await asyncio.sleep(0.5)
        assert await sites.kept("c") == [("a/acme", ("fr", "jp"))], "of its workers elsewhere"
        assert await sites.kept("b") == [("a/acme", ())], "it is in no region of the tenant"
        assert await sites.positions() == {"b": 1, "c": 1}
        await asyncio.sleep(SOON_S)
        assert sites.gateways["b"][0].num_asked == 1

    scenario(test)


def test_usage_at_another_site_goes_with_its_tenant_also_after_a_cut_link() -> None:
    async def test(sites: Sites) -> None:
        record, key = await sites.admin.one("acme"), usage_of("a/acme", day_of(0.0))
        for site in "bc":
            await sites.stores[site].write([("HSET", key, "requests:m", 1)])
        sites.link.cut()
        removal = TenantRemoval(sites.stores["a"], sites.stores["a"].now)
        await removal.remove("acme", with_usage=False)
        await asyncio.sleep(SOON_S)
        assert all([await sites.stores[site].hash_get(key) for site in "bc"])
        await removal.remove("acme", with_usage=True)
        await asyncio.sleep(SOON_S)
        sites.link.restore()
        await asyncio.sleep(SOON_S)
        for site in "bc":
            assert not await sites.stores[site].hash_get(key)
            assert await is_usage_deleted(sites.stores[site], "a/acme", [record.created_at])

    scenario(test)


def test_every_gateway_of_a_site_learns_what_the_site_withdraws() -> None:
    async def test(sites: Sites) -> None:
        others = [await sites.add_gateway(site) for site in "bc"]
        await asyncio.sleep(SOON_S)
        await sites.allow("fr", "jp")
        await asyncio.sleep(1.0)
        for site, other in zip("bc", others, strict=True):
            expected = {("a/acme", site == "c")}
            for each in (*sites.gateways[site], other):
                assert {*each.withdrawn} == expected, site
        assert sites.gateways["a"][0].withdrawn == [], "its own tenant"
        late = await sites.add_gateway("b")
        await asyncio.sleep(SOON_S)
        assert late.withdrawn == [], "it holds nothing yet"
        sites.stores["b"].data.clear()
        await asyncio.sleep(1.0)
        await sites.allow("fr")
        await asyncio.sleep(1.0)
        assert late.withdrawn == [("a/acme", False)]

    scenario(test)


@pytest.mark.parametrize("away", ["home", "other"])
def test_gateways_that_are_all_down_miss_no_order(away: str) -> None:
    async def test(sites: Sites) -> None:
        site = "a" if away == "home" else "b"
        sites.kill(site)
        await sites.allow("fr")
        await asyncio.sleep(20.0)
        assert await sites.ordered("b") == []
        await sites.add_gateway(site)
        await asyncio.sleep(SOON_S)
        assert await sites.ordered("b") == ["a/acme"]
        assert await sites.ordered("c") == ["a/acme"]
        assert await sites.positions() == {"b": 1, "c": 1}

    scenario(test)


def test_a_site_that_is_cut_off_holds_up_no_other_and_misses_nothing() -> None:
    async def test(sites: Sites) -> None:
        sites.link.cut()
        await sites.allow("fr")
        await asyncio.sleep(0.5)
        assert await sites.ordered("c") == ["a/acme"]
        await asyncio.sleep(20.0)
        await sites.allow("fr", "de")
        await sites.allow("fr")
        assert await sites.ordered("b") == []
        sites.kill("a")
        await sites.add_gateway("a")
        sites.link.restore()
        await asyncio.sleep(SOON_S)
        assert await sites.ordered("b") == ["a/acme"]
        confirmed = await site_drops.positions(sites.stores["a"])
        assert confirmed["b"] == await kv_drops.last_number(sites.stores["a"])

    scenario(test)


def test_a_lost_reply_has_the_order_repeated_without_harm() -> None:
    async def test(sites: Sites) -> None:
        sites.link.stall("b", "a")
        await sites.allow("fr")
        await asyncio.sleep(3.0)
        assert await sites.ordered("b") == ["a/acme"]
        assert (await sites.positions()).get("b", 0) == 0
        sites.link.resume("b", "a")
        await asyncio.sleep(SOON_S)
        assert (await sites.positions())["b"] == 1
        assert sites.gateways["b"][0].num_asked > 1
        assert await sites.ordered("b") == ["a/acme"]

    scenario(test)


def test_redis_at_home_is_restarted_with_the_gateways() -> None:
    """It has the orders and positions of its disk; one that came back empty has neither."""

    async def test(sites: Sites) -> None:
        sites.link.cut()
        await sites.allow("fr")
        sites.stores["a"].is_away = True
        sites.kill("a")
        await sites.add_gateway("a")
        sites.link.restore()
        await asyncio.sleep(SOON_S)
        assert await sites.ordered("b") == []
        sites.stores["a"].is_away = False
        await asyncio.sleep(SOON_S)
        assert await sites.ordered("b") == ["a/acme"]
        assert await sites.positions() == {"b": 1, "c": 1}
        for key in (kv_drops.LAST, kv_drops.ORDERS, kv_drops.SITE_POSITIONS):
            sites.stores["a"].data.pop(key, None)
        await asyncio.sleep(SOON_S)
        await sites.admin.add("other", {}, "key of other")
        await sites.admin.change("other", {"allowed_regions": ("fr",)})
        await asyncio.sleep(SOON_S)
        assert await sites.ordered("b") == ["a/acme", "a/other"]
        assert await sites.positions() == {"b": 1, "c": 1}

    scenario(test)


def test_a_site_away_for_longer_than_orders_stay_gets_all_tenants_outside() -> None:
    async def test(sites: Sites) -> None:
        sites.link.cut()
        await sites.allow("fr")
        names = [f"t{number}" for number in range(int(MAX_PER_S) + 20)]  # more than at once
        for each in names:
            await sites.admin.add(each, {"region_class": ""}, f"key of {each}")
            await sites.admin.change(each, {"allowed_regions": ("fr",)})
        orders = sites.stores["a"].data[kv_drops.ORDERS]
        *forgotten, _ = list(orders)
        for each in forgotten:
            del orders[each]
        sites.stores["a"].data[kv_drops.FORGOTTEN] = forgotten[-1]
        sites.link.restore()
        await asyncio.sleep(SOON_S)
        assert set(await sites.ordered("b")) == {"a/acme", *(f"a/{each}" for each in names)}
        assert await sites.positions() == {"b": 1, "c": 1}, "all that are left"

    scenario(test)


def test_an_emptied_redis_has_sites_drop_all_bound_tenants() -> None:
    """The order that a site has missed is lost; its operator makes the tenant anew."""

    async def test(sites: Sites) -> None:
        sites.link.cut()
        await sites.allow("fr")
        await asyncio.sleep(0.5)
        sites.stores["a"].data.clear()
        await asyncio.sleep(0.5)
        await sites.admin.add("acme", {"allowed_regions": ("fr",)}, "key")
        await sites.admin.add("other", {}, "another key")
        sites.link.restore()
        await asyncio.sleep(SOON_S)
        assert await sites.ordered("b") == ["a/acme"]
        assert set(await site_drops.positions(sites.stores["a"])) == {"b", "c"}
        await sites.admin.change("other", {"allowed_regions": ("fr",)})
        await asyncio.sleep(0.5)
        assert await sites.ordered("b") == ["a/acme", "a/other"]

    scenario(test)


@pytest.mark.parametrize("change", [{"is_zero_retention": True}, {"region_class": "eu"}])
def test_every_order_reaches_the_sites_that_it_concerns(change: dict[str, object]) -> None:
    async def test(sites: Sites) -> None:
        await kv_drops.order(sites.stores["a"], "c/of-another", "regions", 0.0)
        await declare_classes(sites.stores["a"], CLASSES)
        await sites.admin.change("acme", change)
        await asyncio.sleep(0.5)
        assert (await sites.ordered("b"), await sites.ordered("c")) == (["a/acme"], ["a/acme"])

    scenario(test)


def test_another_change_is_ordered_though_the_last_one_is_recent() -> None:
    async def test(sites: Sites) -> None:
        for regions in (("fr", "jp"), ("jp",), ("fr", "jp")):
            await sites.allow(*regions)
            await asyncio.sleep(0.5)
        assert await sites.kept("c") == [("a/acme", ("fr", "jp")), ("a/acme", ("jp",))]
        assert await sites.kept("b") == [("a/acme", ())]

    scenario(test)


def test_a_site_withdraws_only_so_many_at_once() -> None:
    async def test(sites: Sites) -> None:
        command = WithdrawTenant(gateway_id="a/gateway-9", tenant_id="acme")
        answer = sites.gateways["b"][0].withdrawals.answer
        with pytest.raises(Exception, match="too many tenants"):
            for _ in range(int(MAX_PER_S) + 1):
                answer(command).close()

    scenario(test)


def test_an_order_that_no_home_gives_leaves_nothing() -> None:
    """One that Redis took and nobody could read again would stay for ever."""

    async def test(sites: Sites) -> None:
        answer, before = sites.gateways["b"][0].withdrawals.answer, dict(sites.stores["b"].data)
        long = ("x" * 256,) * 256
        for name, kept in (("t" * 256, ()), ("t\n", ()), ("c/t", ()), ("", ()), ("t", long)):
            command = WithdrawTenant(gateway_id="a/gw", tenant_id=name, kept_regions=kept)
            with pytest.raises(InvalidRequest):
                await answer(command)
        assert sites.stores["b"].data == before
        await answer(WithdrawTenant(gateway_id="a/gw", tenant_id="t" * 128, kept_regions=()))
        assert set(await sites.ordered("b")) == {"a/" + "t" * 128}

    scenario(test)
