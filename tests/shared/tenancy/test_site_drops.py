"""Which orders a linked site gets, on a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from shared.clock import MonotonicClock
from shared.regions.region_classes import region_classes
from shared.store import RedisStore
from shared.tenancy.deletion import kv_drops, site_drops
from shared.tenancy.deletion.kv_drops import DropProgress, KvDrop
from shared.tenancy.tenant import TenantRecord
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S

CLASSES = region_classes(["eu=fr,de"])


def drop(number: int, tenant_id: str, kept: tuple[str, ...] | None = (), **fields: str) -> KvDrop:
    order = KvDrop(tenant_id=tenant_id, reason="regions", kept_regions=kept, ordered_at=0.0)
    return msgspec.structs.replace(order, number=number, **fields)


def test_a_site_gets_each_tenant_once_with_the_regions_that_it_keeps() -> None:
    drops = [
        drop(1, "before", ("fr",)),
        drop(2, "twice", ("fr", "us")),
        drop(3, "everywhere", None),
        drop(4, "of-class", None, region_class="eu"),
        drop(5, "b/of-another-site", ("fr",)),
        drop(6, "twice", ("fr", "de")),
        drop(7, "removed", reason="removed"),
        drop(8, "unknown-class", ("fr",), region_class="asia"),
    ]
    assert site_drops.orders_for(drops, 1, CLASSES) == [
        (2, "twice", {"fr"}),
        (4, "of-class", {"fr", "de"}),
        (7, "removed", set()),
        (8, "unknown-class", set()),
    ]
    assert site_drops.orders_for(drops, 8, CLASSES) == []


@pytest.mark.parametrize(
    ("position", "last", "expected"), [(0, 0, False), (3, 5, True), (4, 5, False), (5, 5, False)]
)
def test_orders_that_were_forgotten_are_missed(position: int, last: int, expected: bool) -> None:
    drops = [drop(5, "t")] if last else []
    assert site_drops.has_missed(drops, position, last) is expected
    assert site_drops.has_missed([], position, last) is (position < last)


def test_a_site_that_has_missed_orders_gets_all_tenants_with_limits() -> None:
    records = [
        TenantRecord(tenant_id="anywhere"),
        TenantRecord(tenant_id="quiet", is_zero_retention=True),
        TenantRecord(tenant_id="nowhere", allowed_regions=()),
        TenantRecord(tenant_id="bound", region_class="eu", allowed_regions=("us", "fr")),
    ]
    assert site_drops.drops_of_records(records, CLASSES) == [
        (0, "quiet", set()),
        (0, "nowhere", set()),
        (0, "bound", {"fr"}),
    ]


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=LIMIT_S)
    await store.write([("FLUSHALL",)])
    yield store
    await store.close()


async def test_a_position_only_increases(store: RedisStore) -> None:
    for number in range(3):
        order = await kv_drops.order(store, f"t{number}", "removed", 0.0)
        assert order.number == number + 1
    assert [each.drop.number for each in await kv_drops.orders(store)] == [1, 2, 3]
    assert await site_drops.confirm(store, "b", 2)
    assert not await site_drops.confirm(store, "b", 1)
    assert not await site_drops.confirm(store, "b", 4), "no such order: it is of another Redis"
    assert await site_drops.positions(store) == {"b": 2}
    await store.write([("SET", kv_drops.LAST, 1)])  # restored from what it had been before
    assert await site_drops.confirm(store, "b", 1)


async def test_an_order_stays_until_all_sites_have_confirmed(store: RedisStore) -> None:
    later = kv_drops.RETENTION_S + 1
    for number in (1, 2):
        await kv_drops.order(store, "t", "removed", 0.0)
        await kv_drops.report(store, number, DropProgress(finished_at=0.0))
    await site_drops.confirm(store, "b", 2)
    await site_drops.confirm(store, "c", 1)
    await kv_drops.order(store, "t", "removed", later)
    assert [each.drop.number for each in await kv_drops.orders(store)] == [2, 3]
    await kv_drops.order(store, "t", "removed", kv_drops.SITE_RETENTION_S + 1)
    assert [each.drop.number for each in await kv_drops.orders(store)] == [3, 4]
