"""Which orders a linked site gets, on a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from shared.clock import MonotonicClock
from shared.errors import Overloaded
from shared.regions.region_classes import region_classes
from shared.store import RedisStore
from shared.tenancy.deletion import kv_drops, site_drops
from shared.tenancy.deletion.kv_drops import DropProgress, KvDrop
from shared.tenancy.deletion.tenant_removal import TenantWithdrawal
from shared.tenancy.tenant import TenantRecord
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S

CLASSES = region_classes(["eu=fr,de"])


def drop(number: int, tenant_id: str, kept: tuple[str, ...] | None = (), **fields: Any) -> KvDrop:
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
        *(
            drop(number, "removed", reason="removed", created_at=number - 6.5, with_usage=True)
            for number in (9, 10)
        ),
    ]
    assert site_drops.orders_for(drops, 1, CLASSES) == [
        (2, "twice", {"fr"}, ()),
        (4, "of-class", {"fr", "de"}, ()),
        (7, "removed", set(), (2.5, 3.5)),
        (8, "unknown-class", set(), ()),
    ]
    assert site_drops.orders_for(drops, 10, CLASSES) == []


def test_a_site_that_has_missed_orders_gets_all_tenants_with_limits() -> None:
    records = [
        TenantRecord(tenant_id="anywhere"),
        TenantRecord(tenant_id="quiet", is_zero_retention=True),
        TenantRecord(tenant_id="nowhere", allowed_regions=()),
        TenantRecord(tenant_id="bound", region_class="eu", allowed_regions=("us", "fr")),
    ]
    assert site_drops.drops_of_records(records, CLASSES) == [
        (0, "quiet", set(), ()),
        (0, "nowhere", set(), ()),
        (0, "bound", {"fr"}, ()),
    ]


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    store = RedisStore(redis_server.scratch_url, MonotonicClock(), timeout_s=LIMIT_S)
    await store.write([("FLUSHDB",)])
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


async def test_each_site_has_room_for_its_own_orders(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_drops, "MAX_ORDERS", 3)
    names = ["own", *(f"b/t{number}" for number in range(5)), "c/t", "own", "d/t"]
    for each in names:
        await kv_drops.order(store, each, "removed", 0.0)
    found = [each.drop.tenant_id for each in await kv_drops.orders(store)]
    assert found == ["own", "b/t2", "b/t3", "b/t4", "c/t", "own", "d/t"]
    assert await kv_drops.last_forgotten(store) == 0, "those of other sites are not missed"
    for _ in range(2):
        await kv_drops.order(store, "own", "removed", 0.0)
    assert await kv_drops.last_forgotten(store) == 1
    assert len(await kv_drops.orders(store)) == len(found) + 1


async def test_a_site_with_many_open_orders_waits(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_drops, "MAX_OPEN", 2)
    withdrawal = TenantWithdrawal(store, lambda: 0.0)
    for name in ("b/t0", "b/t1"):
        await withdrawal.order(name, "regions")
    with pytest.raises(Overloaded):
        await withdrawal.order("b/t2", "regions")
    await withdrawal.order("b/t1", "regions")  # the same change
    await withdrawal.order("c/t2", "regions")
    await kv_drops.report(store, 1, DropProgress(finished_at=0.0))
    await withdrawal.order("b/t2", "regions")
    found = [each.drop.tenant_id for each in await kv_drops.orders(store)]
    assert found == ["b/t0", "b/t1", "c/t2", "b/t2"]


async def test_an_emptied_redis_gives_no_number_again(store: RedisStore) -> None:
    before = await kv_drops.order(store, "t", "removed", 1_000.0)
    await store.write([("FLUSHDB",)])
    after = await kv_drops.order(store, "t", "removed", 1_000.1)
    assert after.number > before.number


async def test_a_gateway_whose_clock_is_wrong_hides_no_change(store: RedisStore) -> None:
    ahead, right = (TenantWithdrawal(store, lambda at=at: at) for at in (5_000.0, 1_000.0))
    await ahead.order("b/t", "regions")
    await right.order("b/t", "regions")
    await right.order("b/t", "regions")  # the same change
    assert [each.drop.ordered_at for each in await kv_drops.orders(store)] == [5_000.0, 1_000.0]
