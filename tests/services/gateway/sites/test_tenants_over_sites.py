"""A tenant of site a at site b, on real buses and Redis: its key, its revocation, a cut link."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock, patch

import httpx
import pytest
import pytest_asyncio
import structlog

from services.cli.tenants.tenant_where import show_where
from services.gateway.dialects.prefixes.bodies import PrefixRequest
from services.gateway.dialects.prefixes.dialect import OpenPrefixDialect
from services.gateway.dialects.responses.dialect import OpenResponsesDialect
from services.gateway.dialects.responses.storage.record import ResponseRecord
from services.gateway.sites.tenant_copies import TenantCopyReader
from services.gateway.tenancy.errors import PermissionDenied
from services.gateway.tenancy.usage_counter import day_of
from shared.clock import MonotonicClock
from shared.errors import ConfigError
from shared.sites.tenant_names import SiteTenantNames, shared_name
from shared.store import RedisStore
from shared.tenancy import audit
from shared.tenancy.copied_tenants import CopiedTenants
from shared.tenancy.deletion import kv_drops
from shared.tenancy.deletion.tenant_removal import TenantWithdrawal
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import PinnedPrefix
from shared.tenancy.site_admin import copied_tenant, copied_tenants, forget_site_key
from shared.tenancy.stored_responses import response_keys
from shared.tenancy.tenant import TenantRecord, digest_of
from shared.tenancy.tenant_admin import TenantAdmin
from tests.support.services.linked_sites import API_KEY, LinkedPair, LiveSite, linked_pair
from tests.support.services.model_dir import write_model_dir
from tests.support.waiting import LIMIT_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sites(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LinkedPair]:
    """Only site b has a worker."""
    folder = tmp_path_factory.mktemp("sites")
    async with linked_pair(folder, write_model_dir(folder / "tiny")) as pair:
        for each in (pair.a, pair.b):
            await each.start(site=each.name)
        await pair.b.add_worker(num_blocks=64)
        await until(lambda: pair.a.gateway.readiness().ready and pair.b.gateway.readiness().ready)
        yield pair


@asynccontextmanager
async def store_of(site: LiveSite) -> AsyncIterator[RedisStore]:
    store = RedisStore(site.redis_url, MonotonicClock(), timeout_s=LIMIT_S)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def admin_of(site: LiveSite) -> AsyncIterator[TenantAdmin]:
    async with store_of(site) as store:
        yield TenantAdmin(store, lambda: 0.0)


async def ask(site: LiveSite, key: str) -> httpx.Response:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "ignore_eos": True}
    body["messages"] = [{"role": "user", "content": "one"}]
    headers = {"authorization": f"Bearer {key}"}
    return await site.http.post("/v1/chat/completions", json=body, headers=headers)


async def until_status(site: LiveSite, key: str, status: int) -> httpx.Response:
    async def answers() -> httpx.Response | None:
        response = await ask(site, key)
        return response if response.status_code == status else None

    return await until(answers)


async def add_tenant(site: LiveSite, name: str, key: str, **changes: Any) -> None:
    async with admin_of(site) as admin:

        async def is_added() -> bool:
            try:
                await admin.add(name, changes, key)
            except ConfigError as error:
                assert "no gateway has" in error.message, error
                return False
            return True

        await until(is_added)


async def cut(sites: LinkedPair) -> None:
    """Cuts the link, and returns when site b asks site a no more."""
    sites.cut()
    await until(lambda: not sites.b.gateway._sites._over_sites.homes.is_heard("a"))


def pass_time(site: LiveSite, key: str, seconds: float) -> None:
    """Moves the confirmation of a key's tenant into the past."""
    found = site.gateway.tenancy.copied.find(digest_of(key))
    assert found is not None
    found.confirmed_at -= seconds


async def test_key_works_at_both_sites_until_it_is_revoked(sites: LinkedPair) -> None:
    bound = {"sites": ("b",), "region_class": "europe"}
    await add_tenant(sites.a, "team", "key of team", **bound)
    await add_tenant(sites.a, "abroad", "key of abroad", **bound, allowed_regions=("us",))
    await add_tenant(sites.a, "stays", "key of stays")
    await until_status(sites.b, "key of team", 200)
    assert (await ask(sites.a, "key of abroad")).status_code == 403
    assert (await ask(sites.b, "key of abroad")).status_code == 401, "b is not in its regions"
    assert (await ask(sites.a, "key of team")).status_code == 200
    assert (await ask(sites.b, "key of stays")).status_code == 401, "it names no site"
    async with store_of(sites.b) as store:
        await until(lambda: copied_tenants(store))  # a copy is used before Redis has it
        copies = {*await copied_tenants(store)}
        assert copies & {"a/team", "a/abroad", "a/stays"} == {"a/team"}
        copied = await copied_tenant(store, "a/team")
        assert (copied.sites, copied.region_class) == (("b",), "europe")
    shown = (await sites.b.http.get("/metrics")).text
    assert f'hearth_copied_tenants{{site="a"}} {len(copies)}.0' in shown
    assert "hearth_copied_tenants_rejected_total 0.0" in shown
    async with admin_of(sites.b) as admin:
        with pytest.raises(ConfigError, match="'a/team' has its home at site 'a'"):
            await admin.change("a/team", {"requests_per_min": 5})
    async with admin_of(sites.a) as admin:
        await admin.change("team", {"concurrency": 0})
        refused = await until_status(sites.b, "key of team", 403)
        assert refused.json()["error"]["code"] == "limit_is_zero"
        await admin.revoke("team", None)
    await until_status(sites.b, "key of team", 401)


async def test_tenant_of_this_site_comes_before_one_with_its_name_and_key(
    sites: LinkedPair,
) -> None:
    """Both sites have a tenant-1 with the same key; that of a may not do anything."""
    async with admin_of(sites.a) as admin:
        await admin.change("tenant-1", {"sites": ("b",), "concurrency": 0})
    copied = sites.b.gateway.tenancy.copied
    await until(lambda: copied.find(digest_of(API_KEY)))
    assert (await ask(sites.b, API_KEY)).status_code == 200
    assert (await ask(sites.a, API_KEY)).status_code == 403
    async with admin_of(sites.a) as admin:
        await admin.change("tenant-1", {"sites": (), "concurrency": None})
    await until(lambda: copied.find(digest_of(API_KEY)) is None)


async def test_tenant_that_a_site_may_not_serve_any_more_leaves_nothing_there(
    sites: LinkedPair,
) -> None:
    await add_tenant(sites.a, "leaving", "key of leaving", sites=("b",))
    await until_status(sites.b, "key of leaving", 200)
    record = {"name": "rules", "tenant_id": "a/leaving", "model": "m", "messages": []}
    async with store_of(sites.b) as store, admin_of(sites.a) as admin:
        prefix = PinnedPrefix(**record, created_at=1)
        await pinned_prefix.save(store, prefix, time.time())
        began = sites.b.gateway.tenancy.copied.named("a/leaving")
        assert began is not None
        await admin.change("leaving", {"is_zero_retention": True})
        await until(lambda: has_order(store, "zero_retention"))
        await until(lambda: has_no_prefixes(store, "a/leaving"))
        await check_late_text_is_not_stored(sites.b, store, began.tenant)
        await admin.change("leaving", {"sites": ()})
        await until(lambda: has_order(store, "removed"))
        await check_late_text_is_not_stored(sites.b, store, began.tenant)
    await until_status(sites.b, "key of leaving", 401)


async def check_late_text_is_not_stored(
    site: LiveSite, store: RedisStore, began: TenantRecord
) -> None:
    """Of requests that began while the tenant had the record `began`."""
    opened = site.gateway.dialects.opened
    (prefixes,) = (each.store for each in opened if isinstance(each, OpenPrefixDialect))
    (responses,) = (each.store for each in opened if isinstance(each, OpenResponsesDialect))
    body = PrefixRequest(system="Be kind.")
    with pytest.raises(PermissionDenied, match="no longer allows"):
        await prefixes.put(began, "late", body, charge=AsyncMock())
    assert await has_no_prefixes(store, began.tenant_id)
    responses.save(began, ResponseRecord(id="resp_late", response=b'{"output": []}'))
    await responses.stop()
    assert not await store.sorted_set_size(response_keys(began.tenant_id)[1])

    async def is_audited() -> bool:
        lines = await audit.newest(store, 100, ["refusal"])
        own = {each.command for each in lines if began.tenant_id in each.arguments}
        return own >= {"refuse a prefix", "refuse a response"}

    await until(is_audited)


async def has_no_prefixes(store: RedisStore, tenant_id: str) -> bool:
    """The order is there before Redis has nothing of the tenant."""
    return await pinned_prefix.entries(store, tenant_id) == {}


async def has_order(store: RedisStore, reason: str) -> bool:
    drops = [each.drop for each in await kv_drops.orders(store)]
    return [each.tenant_id for each in drops if each.reason == reason][-1:] == ["a/leaving"]


async def test_a_site_drops_what_it_holds_of_a_tenant_that_has_left_its_region(
    sites: LinkedPair,
) -> None:
    """Site b has served a request of the tenant, and has no copy of its record."""
    await add_tenant(sites.a, "moving", "key of moving")
    await until_status(sites.a, "key of moving", 200)
    async with admin_of(sites.a) as admin, store_of(sites.b) as store:
        await admin.change("moving", {"allowed_regions": ("elsewhere",)})

        async def orders() -> list[tuple[str, str]]:
            found = [each.drop for each in await kv_drops.orders(store)]
            return [(each.tenant_id, each.reason) for each in found]

        async def is_ordered() -> bool:
            return ("a/moving", "regions") in await orders()

        await until(is_ordered)
        await admin.change("moving", {"allowed_regions": None})
    await until_status(sites.a, "key of moving", 200)


async def test_cut_link_holds_the_copy_for_a_while(sites: LinkedPair) -> None:
    await add_tenant(sites.a, "away", "key of away", sites=("b",))
    await until_status(sites.b, "key of away", 200)
    await cut(sites)
    assert (await ask(sites.b, "key of away")).status_code == 200
    pass_time(sites.b, "key of away", 301.0)
    refused = await until_status(sites.b, "key of away", 403)
    error = refused.json()["error"]
    assert error["code"] == "tenant_copy_stale"
    assert "home is site 'a', which has not confirmed it since" in error["message"]
    async with store_of(sites.b) as store:
        copied = CopiedTenants("b")
        gateway = sites.b.gateway
        reader = TenantCopyReader(
            gateway._sites._over_sites.homes,
            gateway._clock,
            store,
            copied,
            TenantWithdrawal(store, time.time),
            gateway_id="b/new",
        )
        await reader.start()
        await reader.stop()
        found = copied.find(digest_of("key of away"))
        assert found is not None and found.confirmed_at < 0, "a new process does not trust Redis"
    sites.restore()
    await until_status(sites.b, "key of away", 200)


async def test_new_key_of_a_site_is_refused_until_an_operator_accepts_it(
    sites: LinkedPair,
) -> None:
    await add_tenant(sites.a, "signed", "key of signed", sites=("b",))
    await until_status(sites.b, "key of signed", 200)
    homes = sites.b.gateway._sites._over_sites.homes.by_site
    async with store_of(sites.b) as store:
        await store.write([("HSET", "hearth:site_keys", "a", b"k" * 32)])
        homes["a"].key = None
        await until(lambda: homes["a"].rejected_key)
        pass_time(sites.b, "key of signed", 301.0)
        await until_status(sites.b, "key of signed", 403)
        await forget_site_key(store, "a")
    await until_status(sites.b, "key of signed", 200)


async def used_by(site: LiveSite, tenant_id: str) -> dict[str, int]:
    """Returns the tenant's requests by the site that they ran for."""
    async with admin_of(site) as admin:
        rows = await admin.usage([tenant_id], [day_of(time.time())])
    return {row.site: row.requests for row in rows}


async def test_limits_and_usage_are_those_of_all_sites(sites: LinkedPair) -> None:
    """While the link is cut, b spends its share, and then has its part, 2 of 4, which it has used
    up. The last request there is counted meanwhile, and reported after that.
    """
    limits = {"sites": ("b",), "requests_per_min": 4, "output_tokens_per_min": 100}
    await add_tenant(sites.a, "counted", "key of counted", **limits)
    began_at = time.monotonic()
    await until_status(sites.b, "key of counted", 200)
    assert (await ask(sites.a, "key of counted")).status_code == 200
    there = await ask(sites.b, "key of counted")
    assert there.status_code == 200 and "x-ratelimit-remaining-requests" in there.headers
    await until(lambda: used_by_is(sites, {"": 1, "b": 2}))
    await cut(sites)
    num_there = 2
    while (refused := await ask(sites.b, "key of counted")).status_code == 200:
        num_there += 1
    drained = (time.monotonic() - began_at) * (4 + 2) / 60
    assert refused.status_code == 429 and 1 + num_there <= 4 + drained
    assert "part 2 of this tenant's limit requests_per_min of 4" in refused.text
    pass_time_of_limits(sites.b, "a/counted", 60.0)
    assert (await ask(sites.b, "key of counted")).status_code == 200
    sites.restore()
    await until(lambda: used_by_is(sites, {"": 1, "b": num_there + 1}))
    assert await used_by(sites.b, "a/counted") == {"": num_there + 1}


async def used_by_is(sites: LinkedPair, expected: dict[str, int]) -> bool:
    return await used_by(sites.a, "counted") == expected


def pass_time_of_limits(site: LiveSite, tenant_id: str, seconds: float) -> None:
    account = site.gateway.tenancy.limits._accounts[tenant_id]
    account.counter._at -= seconds
    account.closed = (0, 0, 0.0)


async def test_operator_sees_kv_at_other_sites(
    sites: LinkedPair, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = sites.b.workers[0]._worker.loop.engine.pool
    names = sites.b.gateway._sites._tenants
    for tenant_id, max_named in (("spread", 1000), ("crowd", 0), ("unused", 1000)):
        await add_tenant(sites.a, tenant_id, f"key of {tenant_id}")
        names["a"] = SiteTenantNames(max_named)
        if tenant_id != "unused":
            answer = await sites.a.chat("and so on " * 20, 2, key=f"key of {tenant_id}")
            assert answer.status_code == 200, answer.text
    held_under = {"spread": "a/spread", "crowd": shared_name("a/crowd")}
    cached = {each: pool.num_blocks_of(name) * 16 for each, name in held_under.items()}
    assert min(cached.values()) > 0

    at_b = {"site": "b", "region": "eu", "workers": 1}
    for tenant_id, tokens in (
        ("spread", {"cached_tokens": cached["spread"]}),
        ("crowd", {"shared_tokens": cached["crowd"]}),
        ("unused", {}),
    ):
        await until_where(sites.a, tenant_id, at_b | tokens, capsys)
    await cut(sites)
    try:
        unheard = {"site": "b", "region": "eu", "problem": "site 'b' is not heard"}
        await until_where(sites.a, "spread", unheard, capsys)
    finally:
        sites.restore()


async def until_where(
    site: LiveSite, tenant_id: str, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Waits until `hearth tenant show --where` prints this of the other site."""
    nats_url = site.common("operator")["nats_url"]

    async def shown() -> Any:
        with patch.object(structlog, "configure"):  # for a process of its own
            await asyncio.to_thread(show_where, tenant_id, site.redis_url, nats_url, is_json=True)
        lines = capsys.readouterr().out.splitlines()  # of the log, too
        return json.loads(next(each for each in lines if each.startswith("{")))["sites"]

    async def is_expected() -> bool:
        return await shown() == [expected]

    await until(is_expected)
