"""What a home site answers to sites that ask about its tenants, hostile ones included."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from services.gateway.sites import home_tenants
from services.gateway.sites.home_accounts import HomeAccounts
from services.gateway.sites.home_tenants import MAX_READS_PER_S, HomeTenants
from shared.errors import DependencyUnavailable, InvalidRequest, Overloaded
from shared.messages import (
    LeaseLimits,
    LeaseState,
    LeaseStep,
    LimitsLeased,
    ReadTenantCopies,
    TenantCopies,
)
from shared.regions.region_classes import region_classes
from shared.secrets.secret import Secret
from shared.tenancy.declared_classes import declare_classes
from shared.tenancy.tenant_admin import TenantAdmin
from shared.tenancy.tenant_copy import SITES, opened_copy
from tests.support.world.clock import VirtualClock, run
from tests.support.world.store import MemoryStore


async def home(*, cluster_secret: str = "secret") -> HomeTenants:
    """The home of `both`, which sites b and c may serve, and `only-b`."""
    store = MemoryStore()
    await store.write([("HSET", SITES, "b", "", "c", "")])
    await declare_classes(store, region_classes(["eu=eu", "us=us"]))
    admin = TenantAdmin(store, lambda: 0.0)
    await admin.add("both", {"sites": ("b", "c"), "concurrency": 1}, "key of both")
    await admin.add("only-b", {"sites": ("b",)}, "key of only-b")
    await admin.add("nobody", {}, "key of nobody")
    accounts = HomeAccounts(store, lambda: 0.0, gateway_id="a/gateway")
    return HomeTenants(
        store,
        VirtualClock(),
        accounts,
        site="a",
        gateway_id="a/gateway",
        cluster_secret=Secret(cluster_secret),
        region_of={"b": "eu", "c": "us"}.get,
    )


async def copies(tenants: HomeTenants, site: str, *held: tuple[str, int]) -> TenantCopies:
    reply = await tenants.answer(ReadTenantCopies(gateway_id=f"{site}/gateway", held=held))
    assert isinstance(reply, TenantCopies)
    return reply


def names(reply: TenantCopies) -> list[tuple[str, str]]:
    found = (opened_copy(each, reply.key) for each in reply.copies)
    return [(each.record.tenant_id, each.site) for each in found]


def test_site_gets_the_tenants_that_name_it_and_no_others() -> None:
    async def work() -> None:
        tenants = await home()
        of_b = await copies(tenants, "b")
        assert names(of_b) == [("both", "b"), ("only-b", "b")]
        assert names(await copies(tenants, "c")) == [("both", "c")]
        assert names(await copies(tenants, "d")) == []
        again = await copies(tenants, "b", *of_b.versions)
        assert (again.versions, again.copies) == (of_b.versions, ())
        (name, version), _ = of_b.versions
        assert names(await copies(tenants, "b", (name, version - 1), of_b.versions[1])) == [
            ("both", "b")
        ]

    run(work())


def test_record_goes_to_sites_in_the_regions_of_its_tenant_alone() -> None:
    async def work() -> None:
        tenants = await home()
        admin = TenantAdmin(tenants._store, lambda: 0.0)
        await admin.change("both", {"allowed_regions": ("eu",)})
        assert [name for name, _ in names(await copies(tenants, "b"))] == ["both", "only-b"]
        assert names(await copies(tenants, "c")) == []
        await admin.change("only-b", {"allowed_regions": ("us",)})
        tenants._read_at = -inf
        of_b = await copies(tenants, "b")
        assert [name for name, _ in of_b.versions] == ["both"], "b takes the other one away"

    run(work())


def test_home_that_has_not_heard_a_site_does_not_take_its_tenants_away() -> None:
    """A gateway of the home has started again, and is asked before the first state comes."""

    async def work() -> None:
        tenants = await home()
        admin = TenantAdmin(tenants._store, lambda: 0.0)
        await tenants._store.write([("HSET", SITES, "d", "")])
        await admin.change("both", {"sites": ("d",), "allowed_regions": ("eu",)})
        with pytest.raises(DependencyUnavailable, match="site 'd' has not been heard here yet"):
            await copies(tenants, "d")
        assert names(await copies(tenants, "b")) == [("only-b", "b")]

    run(work())


def test_tenant_that_a_site_has_gives_way_to_no_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site deletes the data of a tenant that its home does not name any more."""

    async def work() -> None:
        tenants = await home()
        monkeypatch.setattr(home_tenants, "MAX_COPIES", 2)
        of_b = await copies(tenants, "b")
        admin = TenantAdmin(tenants._store, lambda: 0.0)
        await admin.add("a-new-one", {"sites": ("b",)}, "key of a-new-one")
        tenants._read_at = -inf
        assert (await copies(tenants, "b", *of_b.versions)).versions == of_b.versions
        assert [name for name, _ in (await copies(tenants, "b")).versions] == ["a-new-one", "both"]

    run(work())


def test_site_uses_the_limits_of_the_tenants_that_name_it_alone() -> None:
    async def work() -> None:
        tenants = await home()

        async def lease(site: str, name: str, number: int, **parts: Any) -> LeaseState:
            step = LeaseStep(lease_id="s", number=number, **parts)
            reply = await tenants.answer(
                LeaseLimits(gateway_id=f"{site}/gateway", tenant_id=name, step=step)
            )
            assert isinstance(reply, LimitsLeased)
            return reply.state

        for site, name in (("c", "only-b"), ("b", "nobody"), ("b", "none")):
            with pytest.raises(InvalidRequest, match=f"no tenant '{name}' names the site '{site}'"):
                await lease(site, name, 1)
        slot = ({"concurrency": 1},)
        first = await lease("b", "both", 1, asked=slot)
        assert (first.rejections, first.pool) == ((("", 0.0),), {"concurrency": 1})
        other = await lease("c", "both", 1, num_open=0)
        assert other.num_open == 1, "c cannot end what b has open"
        second = await lease("c", "both", 2, asked=slot)
        assert second.rejections[0][0] == "concurrency"

    run(work())


def test_site_that_asks_too_often_is_refused() -> None:
    async def work() -> None:
        tenants = await home()
        for _ in range(int(MAX_READS_PER_S)):
            await copies(tenants, "b")
        with pytest.raises(Overloaded, match="asks about tenants too often"):
            await copies(tenants, "b")
        assert await copies(tenants, "c"), "other sites are not"

    run(work())


def test_home_without_a_secret_says_so() -> None:
    async def work() -> None:
        with pytest.raises(DependencyUnavailable, match="need a cluster secret"):
            await copies(await home(cluster_secret=""), "b")

    run(work())
