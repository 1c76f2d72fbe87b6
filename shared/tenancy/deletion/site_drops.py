"""Which orders to drop a tenant's KV linked sites have confirmed, and which they get next.

    hearth:kv_drops:sites      hash: site → the number up to which it has confirmed all orders

    operator ──KvDrop──▶ Redis ◀──reads── every gateway ──WithdrawTenant──▶ gateway of a site
                         Redis ◀──confirm─────────────────Done◀──────────┘

An order waits here for a site that is cut off, and outlives every gateway. To repeat one is
harmless.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shared.regions.region_classes import RegionClasses
from shared.store import Store, reading_reply
from shared.subjects import is_at_site
from shared.tenancy.deletion.kv_drops import LAST, SITE_POSITIONS, KvDrop
from shared.tenancy.residency import may_hold
from shared.tenancy.tenant import TenantRecord

# KEYS: the positions, the last number. ARGV: a site, a number. A position never decreases, and a
# Redis that was emptied takes none of its predecessor's orders.
CONFIRM_LUA = """
local number = tonumber(ARGV[2])
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
local before = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0')
if number > last or (number <= before and before <= last) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], number)
return 1
"""


class SiteDrop(NamedTuple):
    """`number` is that of the order."""

    number: int
    tenant_id: str


async def positions(store: Store) -> dict[str, int]:
    """Returns the number up to which each site has confirmed. Raises StoreUnavailable."""
    found = await store.hash_get(SITE_POSITIONS)
    return {name.decode(): int(data) for name, data in found.items() if data.isdigit()}


async def confirm(store: Store, site: str, number: int) -> bool:
    """Records that a site has confirmed all orders up to `number`. Returns False if that is not
    new, or the orders are those of a Redis before. Raises StoreUnavailable.
    """
    reply = await store.evaluate(CONFIRM_LUA, [SITE_POSITIONS, LAST], [site, number])
    with reading_reply():
        return bool(int(reply))


def orders_for(
    drops: Sequence[KvDrop], position: int, region: str, classes: RegionClasses
) -> list[SiteDrop]:
    """Returns what a site in `region` has not confirmed of tenants of this site; `drops` are sorted
    by number. Of several orders on one tenant, the first stands for all: the site drops everything
    whenever it comes.
    """
    found: dict[str, SiteDrop] = {}
    for each in drops:
        is_new = each.number > position and not is_at_site(each.tenant_id)
        if is_new and _concerns(each, region, classes):
            found.setdefault(each.tenant_id, SiteDrop(each.number, each.tenant_id))
    return list(found.values())


def has_missed(drops: Sequence[KvDrop], position: int, last: int) -> bool:
    """Whether orders were forgotten that a site has not confirmed: it was away for too long."""
    oldest = drops[0].number if drops else last + 1
    return position < min(oldest - 1, last)


def tenants_outside(
    records: Iterable[TenantRecord], region: str, classes: RegionClasses
) -> list[str]:
    """Returns the tenants of which a site in `region` may retain nothing."""
    return [
        each.tenant_id
        for each in records
        if each.is_zero_retention or not may_hold(each, region, classes)
    ]


def _concerns(drop: KvDrop, region: str, classes: RegionClasses) -> bool:
    if drop.reason != "regions":
        return True
    kept = classes.allowed(drop.region_class, drop.kept_regions)
    return kept is not None and region not in kept
