"""The versions of tenants that other sites may serve, on a real Redis."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

from services.gateway.tenancy.usage_counter import day_of
from shared.clock import MonotonicClock
from shared.errors import ConfigError, InvalidRequest
from shared.regions.region_classes import region_classes
from shared.store import RedisStore, StoreUnavailable
from shared.tenancy.declared_classes import declare_classes
from shared.tenancy.home_tenants import MAX_RECORDED, HomeTenant, read_home_tenants, record_totals
from shared.tenancy.site_usage import MAX_TOTALS, reports_of
from shared.tenancy.tenant import TENANTS, USAGE_KINDS, digest_of, keys_of
from shared.tenancy.tenant_admin import TenantAdmin
from shared.tenancy.tenant_copy import SITES, TENANT_VERSIONS
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    store = RedisStore(redis_server.scratch_url, MonotonicClock(), timeout_s=LIMIT_S)
    await store.write([("FLUSHDB",), ("HSET", SITES, "b", "", "c", "")])
    yield store
    await store.close()


@pytest.fixture
def admin(store: RedisStore) -> TenantAdmin:
    return TenantAdmin(store, time.time)


async def only(store: RedisStore) -> HomeTenant:
    (found,) = await read_home_tenants(store)
    return found


async def test_version_grows_with_record_and_keys(store: RedisStore, admin: TenantAdmin) -> None:
    await admin.add("here-alone", {}, "first")
    assert await read_home_tenants(store) == []
    await admin.add("team", {"sites": ("b", "c")}, "key")
    made = await only(store)
    assert (made.record.sites, made.key_digests) == (("b", "c"), (digest_of("key"),))
    assert await only(store) == made, "nothing has changed"
    versions, changed = [made.version], made
    for change in (
        lambda: admin.change("team", {"requests_per_min": 5}),
        lambda: admin.add_key("team", "second"),
        lambda: admin.revoke("team", None),
    ):
        await change()
        changed = await only(store)
        versions.append(changed.version)
    assert versions == sorted(set(versions))
    assert (changed.record.requests_per_min, changed.key_digests) == (5, ())
    await admin.add_client("team", "billing")
    assert (await only(store)).version == versions[-1], "a NATS client stays at its site"


async def test_key_ends_by_the_clock_of_redis(store: RedisStore, admin: TenantAdmin) -> None:
    await admin.add("team", {"sites": ("b",)}, "old")
    await TenantAdmin(store, lambda: 1000.0).rotate("team", "new", keep_s=10.0, key_id=None)
    assert (await only(store)).key_digests == (digest_of("new"),)


async def test_lost_versions_grow_all_the_same(store: RedisStore, admin: TenantAdmin) -> None:
    await admin.add("team", {"sites": ("b",)}, "key")
    before = await only(store)
    await store.write([("DEL", TENANT_VERSIONS)])
    assert (await only(store)).version >= before.version >= time.time() - 60
    await store.write([("DEL", TENANTS), ("DEL", keys_of("team")), ("DEL", "hearth:generation")])
    with pytest.raises(StoreUnavailable, match="Redis is empty"):
        await read_home_tenants(store)


async def test_site_without_a_link_is_one_clear_line(admin: TenantAdmin) -> None:
    with pytest.raises(ConfigError) as caught:
        await admin.add("team", {"sites": ("b", "d")}, "key")
    assert caught.value.message == ("no gateway has heard a site 'd' over a link: linked are b, c")
    await admin.add("team", {"sites": ("b",)}, "key")
    with pytest.raises(ConfigError, match="no gateway has heard a site 'd'"):
        await admin.change("team", {"sites": ("b", "d")})


async def test_totals_of_a_site_count_once(store: RedisStore, admin: TenantAdmin) -> None:
    await admin.add("team", {"sites": ("b",)}, "key")
    today, now = day_of(time.time()), time.time()
    for requests, tokens in ((3, 30), (3, 30), (2, 20)):  # sent again, and late
        totals = [("requests:m", requests), ("input_tokens:m", tokens)]
        await record_totals(store, "team", "b", today, totals, now)
    (row,) = await admin.usage(["team"], [today])
    assert (row.site, row.requests, row.input_tokens) == ("b", 3, 30)
    await admin.change("team", {"sites": ()})
    await record_totals(store, "team", "b", today, [("requests:m", 4)], now)
    (row,) = await admin.usage(["team"], [today])
    assert (row.site, row.requests, row.input_tokens) == ("b", 4, 30)


def test_usage_of_many_models_is_reported_in_parts() -> None:
    fields = {f"{kind}:{n}".encode(): b"7" for n in range(99) for kind in USAGE_KINDS}
    parts = reports_of(fields)
    assert [len(each) for each in parts] == [MAX_TOTALS, 4 * 99 - MAX_TOTALS]
    assert {name for part in parts for name, _ in part} == {each.decode() for each in fields}


async def test_site_reports_only_what_it_may(store: RedisStore, admin: TenantAdmin) -> None:
    await admin.add("team", {"sites": ("b",)}, "key")
    today, now = day_of(time.time()), time.time()
    many = [(f"requests:{number}", 1) for number in range(MAX_RECORDED)]
    await record_totals(store, "team", "b", today, many, now)
    await record_totals(store, "team", "b", today, [("requests:more", 1)], now)
    assert len(await admin.usage(["team"], [today])) == MAX_RECORDED
    for tenant, site, day, totals, reason in (
        ("team", "c", today, many, "no tenant 'team' has named this site"),
        ("other", "b", today, many, "no tenant 'other' has named this site"),
        ("team", "b", "2020-01-01", many, "'2020-01-01' is not of the last 31 days"),
        ("team", "b", "2100-01-01", many, "the clocks of the two sites are apart"),
        ("team", "b", "never", many, "'never' is not of the last 31 days"),
        ("team", "b", today.replace("-", ""), many, "is not of the last 31 days"),
        ("team", "b", today, [("x:m", 1)], "usage has no count 'x:m'"),
        ("team", "b", today, [("requests:\x1b[2J", 1)], "usage has no count"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            await record_totals(store, tenant, site, day, totals, now)


async def test_a_linked_site_takes_allowed_regions_of_a_class_alone(
    store: RedisStore, admin: TenantAdmin
) -> None:
    await declare_classes(store, region_classes(["eu=fr,de"]))
    await admin.add("named", {"allowed_regions": ("de", "fr")}, "key of named")
    await admin.add("free", {}, "key of free")
    with pytest.raises(ConfigError, match="declare a class"):
        await admin.add("bound", {"allowed_regions": ("fr",)}, "key of bound")
    with pytest.raises(ConfigError, match="declare a class"):
        await admin.change("free", {"allowed_regions": ("fr",)})
    await admin.change("free", {"allowed_regions": ("fr",), "region_class": "eu"})
    with pytest.raises(ConfigError, match="declare a class"):
        await admin.change("free", {"region_class": ""})
    await admin.change("free", {"allowed_regions": ()})  # nowhere
    assert (await admin.one("free")).allowed_regions == ()
    await store.write([("DEL", SITES)])
    await admin.change("free", {"allowed_regions": ("fr",), "region_class": ""})
