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
from shared.tenancy.residency import regions_of
from shared.tenancy.tenant import TenantRecord

NONE = frozenset[str]()

# KEYS: the positions, the last number. ARGV: a site, a number. A position never decreases, and a
# Redis that was emptied takes none of its predecessor's orders. It has no position of a site that
# is linked already.
CONFIRM_LUA = """
local number = tonumber(ARGV[2])
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
local before = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '-1')
if number > last or (number <= before and before <= last) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], number)
return 1
"""


class SiteDrop(NamedTuple):
    """What a site drops of a tenant: all but what is in `kept` regions. `number` is the order's.
    `usage_of` are the creations of removed tenants of this name whose usage is deleted, too.
    """

    number: int
    tenant_id: str
    kept: frozenset[str] = frozenset()
    usage_of: tuple[float, ...] = ()


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


def orders_for(drops: Sequence[KvDrop], position: int, classes: RegionClasses) -> list[SiteDrop]:
    """Returns what a site has not confirmed of tenants of this site; `drops` are sorted by number.
    Several orders on one tenant are one, at the place of the first. Sites in allowed regions get
    them as well: they may have workers in others.
    """
    found: dict[str, SiteDrop] = {}
    for each in drops:
        kept = _kept(each, classes)
        if each.number > position and kept is not None and not is_at_site(each.tenant_id):
            first = found.setdefault(each.tenant_id, SiteDrop(each.number, each.tenant_id, kept))
            usage_of = (*first.usage_of, each.created_at) if each.with_usage else first.usage_of
            found[each.tenant_id] = first._replace(kept=first.kept & kept, usage_of=usage_of)
    return list(found.values())


def drops_of_records(records: Iterable[TenantRecord], classes: RegionClasses) -> list[SiteDrop]:
    """Returns what a site that has missed orders drops, of all tenants; the numbers are 0."""
    kept = ((each, regions_of(each, classes)) for each in records)
    return [
        SiteDrop(0, each.tenant_id, frozenset() if each.is_zero_retention else regions or NONE)
        for each, regions in kept
        if each.is_zero_retention or regions is not None
    ]


def _kept(drop: KvDrop, classes: RegionClasses) -> frozenset[str] | None:
    """Returns None for an order that concerns nobody."""
    return (
        classes.allowed(drop.region_class, drop.kept_regions) if drop.reason == "regions" else NONE
    )
