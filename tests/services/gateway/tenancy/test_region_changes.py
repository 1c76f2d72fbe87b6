"""A gateway watches the regions of its site's tenants."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.gateway.tenancy.errors import NoRegionAllowed
from services.gateway.tenancy.region_changes import RegionChanges, changed_regions
from services.gateway.tenancy.region_rule import RegionRule
from shared.clock import MonotonicClock
from shared.regions.region_classes import region_classes
from shared.store import RedisStore
from shared.tenancy.declared_classes import declare_classes
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.refusals import Refusals
from shared.tenancy.tenant import TENANTS, TenantRecord
from shared.tenancy.tenant_admin import TenantAdmin
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S

CLASSES = region_classes(["eu=fr,de"])


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    store = RedisStore(redis_server.scratch_url, MonotonicClock(), timeout_s=LIMIT_S)
    await store.write([("FLUSHDB",)])
    yield store
    await store.close()


async def test_changes_of_regions_are_found(store: RedisStore) -> None:
    admin, found = TenantAdmin(store, lambda: 0.0), list[tuple[str, TenantRecord | None]]()
    changes = RegionChanges(store, MonotonicClock(), lambda *each: found.append(each))
    await declare_classes(store, CLASSES)
    for name in ("acme", "other"):
        await admin.add(name, {}, f"key-of-{name}")
    await changes.poll()
    await changes.poll()
    assert found == []
    await admin.change("acme", {"allowed_regions": ("fr",)})
    await admin.change("other", {"priority": 1})
    await pinned_prefix.record_change(store, "other")  # as a prefix of it has changed
    await changes.poll()
    assert [tenant_id for tenant_id, _ in found] == ["acme"]
    assert found[0][1] is not None and found[0][1].allowed_regions == ("fr",)
    await admin.change("other", {"region_class": "eu"})
    await changes.poll()
    assert [tenant_id for tenant_id, _ in found] == ["acme", "other"]
    await store.write([("HDEL", TENANTS, "acme")])
    await pinned_prefix.record_change(store, "acme")
    await changes.poll()
    await changes.poll()
    assert found[2:] == [("acme", None)]
    added = await admin.add("acme", {}, "another-key")
    await changes.poll()
    assert found[3:] == [("acme", added)]


async def test_a_lost_redis_is_read_again(store: RedisStore) -> None:
    admin, found = TenantAdmin(store, lambda: 0.0), list[str]()
    changes = RegionChanges(store, MonotonicClock(), lambda name, _: found.append(name))
    await admin.add("acme", {}, "key")
    await pinned_prefix.record_change(store, "acme")
    await pinned_prefix.record_change(store, "acme")
    await changes.poll()
    await store.write([("FLUSHDB",)])
    await changes.poll()
    assert found == []  # an empty Redis removes no tenant
    await admin.add("acme", {"allowed_regions": ("fr",)}, "key")
    await changes.poll()
    assert found == ["acme"]


def test_what_a_record_means_for_open_requests() -> None:
    refusals = Refusals("fr", CLASSES)
    rule = RegionRule("fr", CLASSES, refusals)
    tenant = TenantRecord(tenant_id="acme", region_class="eu")
    changed = changed_regions("acme", tenant, rule)
    assert (changed.allowed_regions, changed.region_class, changed.error) == (
        *(("de", "fr"), "eu"),
        None,
    )
    anywhere = changed_regions("acme", TenantRecord(tenant_id="acme"), rule)
    assert (anywhere.allowed_regions, anywhere.error) == ((), None)
    named = TenantRecord(tenant_id="acme", allowed_regions=("fr", "de"))
    assert changed_regions("acme", named, rule).region_class == "eu"
    gone = changed_regions("acme", None, rule)
    assert gone.error is None and gone.is_gone
    assert not refusals.totals
    for record in (
        TenantRecord(tenant_id="acme", allowed_regions=("us",)),
        TenantRecord(tenant_id="acme", allowed_regions=()),
        TenantRecord(tenant_id="acme", region_class="asia"),
    ):
        assert isinstance(changed_regions("acme", record, rule).error, NoRegionAllowed)
    assert refusals.totals == {"gateway": 3}
