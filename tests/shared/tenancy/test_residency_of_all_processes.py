"""Whatever a tenant's bounds and their changes, no check of any kind of process lets data out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest

from services.gateway.streams.changed_regions import ChangedRegions
from services.gateway.tenancy.errors import NoRegionAllowed
from services.gateway.tenancy.region_changes import changed_regions
from services.gateway.tenancy.region_rule import RegionRule
from shared.clock import MonotonicClock
from shared.errors import OutsideRegions
from shared.kv_wire.link import PushBounds
from shared.messages import PinPrefix, Request
from shared.regions.region_classes import RegionClasses
from shared.store import RedisStore
from shared.tenancy.deletion.kv_drops import KvDrop
from shared.tenancy.deletion.site_drops import orders_for
from shared.tenancy.refusals import Check, Refusals
from shared.tenancy.residency import may_hold, regions_of
from shared.tenancy.tenant import MAY_STORE_LUA, RECORD_KEYS, TenantRecord, class_argument
from tests.services.gateway.streams.test_streams import request
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S

REGIONS = ("fr", "de", "us", "jp", "br", "za")
CHECKS: tuple[Check, ...] = ("scheduler", "decode", "prefill", "pin", "kv_push", "site", "trace")
SEEDS = range(200)


@dataclass
class World:
    """Classes, a tenant that changes, and processes in every region and in none."""

    seed: int

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        names = [f"class{number}" for number in range(self.draw.randint(0, 3))]
        self.classes = RegionClasses({each: frozenset(self.some(1)) for each in names})
        self.class_names = ("", *names, "undeclared")

    def some(self, least: int) -> list[str]:
        return self.draw.sample(REGIONS, self.draw.randint(least, len(REGIONS)))

    def tenant(self) -> TenantRecord:
        allowed = tuple(self.some(0)) if self.draw.random() < 0.7 else None
        if allowed is not None and self.draw.random() < 0.1:
            allowed += ("",)  # of no process
        region_class = self.draw.choice(self.class_names)
        return TenantRecord(tenant_id="t", allowed_regions=allowed, region_class=region_class)

    def changes(self) -> Iterator[TenantRecord]:
        for _ in range(self.draw.randint(1, 6)):
            yield self.tenant()

    def admitted(self, tenant: TenantRecord, region: str) -> Request | None:
        """What a gateway of the region makes of a request; None: it refuses."""
        try:
            record = RegionRule(region, self.classes).admitted(tenant)
        except NoRegionAllowed:
            return None
        return msgspec.structs.replace(
            request(),
            allowed_regions=record.allowed_regions or (),
            region_class=record.region_class,
        )


def passes(refusals: Refusals, check: Check, owner: Request | PinPrefix) -> bool:
    try:
        refusals.require(check, owner)
    except OutsideRegions:
        return False
    return True


@pytest.mark.parametrize("seed", SEEDS[::10])
def test_what_a_check_lets_pass_is_in_the_tenants_regions(seed: int) -> None:
    for world in map(World, range(seed, seed + 10)):
        tenant = world.tenant()
        for gateway in (*REGIONS, ""):
            sent = world.admitted(tenant, gateway)
            assert (sent is not None) is may_hold(tenant, gateway, world.classes)
            if sent is None:
                continue
            pin = PinPrefix(
                tenant_id="t",
                model="m",
                revision="r",
                cache_root=b"r" * 16,
                token_ids=b"",
                block_hashes=b"",
                lease_s=1.0,
                allowed_regions=sent.allowed_regions,
                region_class=sent.region_class,
            )
            for region in (*REGIONS, ""):
                is_allowed = may_hold(tenant, region, world.classes)
                refusals = Refusals(region, world.classes)
                for check in CHECKS:
                    assert passes(refusals, check, sent) is is_allowed
                    assert passes(refusals, check, pin) is is_allowed
                assert sum(refusals.totals.values()) == (0 if is_allowed else 2 * len(CHECKS))


# KEYS: all tenants, all copies. ARGV: the tenant, its record, when it was created, then pairs of a
# region and its classes.
STORES_LUA = (
    MAY_STORE_LUA
    + """
local found = {}
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
for i = 4, #ARGV, 2 do
  local may = may_store(KEYS[1], KEYS[2], ARGV[1], ARGV[3], ARGV[i], ARGV[i + 1])
  found[#found + 1] = may and 1 or 0
end
return found
"""
)


async def test_redis_stores_text_in_the_tenants_regions_alone(redis_server: RedisServer) -> None:
    """Whatever gateways check, and whichever record they began with."""
    store = RedisStore(redis_server.scratch_url, MonotonicClock(), timeout_s=LIMIT_S)
    regions = (*REGIONS, "")
    for world in map(World, SEEDS):
        for tenant in (world.tenant(), *world.changes()):
            is_kept = world.draw.random() < 0.8
            tenant = msgspec.structs.replace(tenant, is_zero_retention=not is_kept)
            named = ((each, class_argument(world.classes.with_region(each))) for each in regions)
            arguments = [
                "t",
                msgspec.json.encode(tenant),
                0.0,
                *(a for pair in named for a in pair),
            ]
            found = await store.evaluate(STORES_LUA, RECORD_KEYS, arguments)
            assert [bool(each) for each in found] == [
                is_kept and may_hold(tenant, each, world.classes) for each in regions
            ], tenant
    await store.close()


@pytest.mark.parametrize("seed", SEEDS[::10])
def test_kv_moves_between_regions_of_the_tenant_alone(seed: int) -> None:
    for world in map(World, range(seed, seed + 10)):
        tenant = world.tenant()
        regions = regions_of(tenant, world.classes)
        if regions is None:
            continue
        for own in (*REGIONS, ""):
            for peer in (*REGIONS, ""):
                expected, claimed = world.draw.choice([peer, *REGIONS]), peer
                is_open = PushBounds(regions, expected).allow(own, claimed)
                ends = {own, peer} if expected == claimed else {""}
                assert is_open is all(may_hold(tenant, each, world.classes) for each in ends)


@pytest.mark.parametrize("seed", SEEDS[::10])
def test_all_sites_are_ordered_to_drop_what_lies_outside(seed: int) -> None:
    for world in map(World, range(seed, seed + 10)):
        tenant = world.tenant()
        drop = KvDrop(
            number=1,
            tenant_id="t",
            reason="regions",
            kept_regions=tenant.allowed_regions,
            region_class=tenant.region_class,
            ordered_at=0.0,
        )
        ordered = orders_for([drop], 0, world.classes)
        for region in (*REGIONS, ""):
            is_kept = not ordered or region in ordered[0].kept
            assert is_kept is may_hold(tenant, region, world.classes)


@pytest.mark.parametrize("seed", SEEDS[::10])
def test_open_requests_follow_every_change(seed: int) -> None:
    """A request stays where it may be only if all regions that it names still are the tenant's."""
    for world in map(World, range(seed, seed + 10)):
        gateway = world.draw.choice(REGIONS)
        sent = world.admitted(world.tenant(), gateway)
        if sent is None:
            continue
        rule = RegionRule(gateway, world.classes)
        for tenant in world.changes():
            changed: ChangedRegions = changed_regions("t", tenant, rule)
            is_here = may_hold(tenant, gateway, world.classes)
            assert (changed.error is None) is is_here
            if not is_here:
                break
            before, was_moved = sent, changed.narrows(sent)
            sent = changed.applied(sent)
            now = regions_of(tenant, world.classes)
            assert regions_of(sent, world.classes) == now
            named = regions_of(before, world.classes)
            if now is not None and not was_moved:
                assert named is not None and named <= now
