"""Orders to drop the KV of tenants on workers, and how far they are.

    hearth:kv_drops            hash: number → a KvDrop as JSON
    hearth:kv_drops:progress   hash: number → a DropProgress as JSON
    hearth:kv_drops:last       the number of the last order
    hearth:kv_drops:forgotten  the last of this site's own orders that has been forgotten
    hearth:kv_drops:sites      hash: see site_drops.py

    command, gateway ──KvDrop──▶ kv_index ──DropTenantKv──▶ every worker
                                 DropProgress ◀──TenantKvDropped──┘

An order stays for RETENTION_S: a worker that was silent gets it when it is back. One that a linked
site has not confirmed stays for SITE_RETENTION_S. The first number is the time in milliseconds: a
Redis that was emptied gives no number again.

This site, and each other one that orders for its own tenants, has room for MAX_ORDERS: none crowds
out the orders of another.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from shared.messages import Count, Name
from shared.store import Store
from shared.subjects import is_at_site, site_in
from shared.transport.wire_errors import UNREADABLE

ORDERS = "hearth:kv_drops"
PROGRESS = "hearth:kv_drops:progress"
LAST = "hearth:kv_drops:last"
FORGOTTEN = "hearth:kv_drops:forgotten"
SITE_POSITIONS = "hearth:kv_drops:sites"
RETENTION_S = 86_400.0
SITE_RETENTION_S = 30 * RETENTION_S
MAX_ORDERS = 1000  # of one site
MAX_OPEN = 500  # that have not finished, of another site
T = TypeVar("T")

# zero_retention: its requests go on, and leave nothing. removed: its requests end. regions: sites
# in its regions keep its requests, and those outside end them.
DropReason = Literal["zero_retention", "removed", "regions"]

# KEYS: the last number, the orders. ARGV: an order, the number before the first one. Returns the
# order's number. Both are written at once: whoever reads the last number finds all orders up to it.
ORDER_LUA = """
redis.call('SETNX', KEYS[1], ARGV[2])
local number = redis.call('INCRBY', KEYS[1], 1)
redis.call('HSET', KEYS[2], number, ARGV[1])
return number
"""

# KEYS: a number. ARGV: another one, which takes its place if it is higher.
RAISE_LUA = """
local before = tonumber(redis.call('GET', KEYS[1]) or '0')
if tonumber(ARGV[1]) > before then redis.call('SET', KEYS[1], ARGV[1]) end
return 0
"""


class KvDrop(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An order; its field of the hash is its number. Sites in `kept_regions` (None: any), and in
    the region class, if there is one, go on with a tenant whose regions have changed. A removed
    tenant was created at `created_at`; `with_usage`: its usage is deleted, too, at all sites. Times
    are Unix seconds.
    """

    number: Count = 0
    tenant_id: Name
    reason: DropReason
    kept_regions: Annotated[tuple[Name, ...], Meta(max_length=4096)] | None = ()
    region_class: Name = ""
    created_at: float = 0.0
    with_usage: bool = False
    ordered_at: float


class DropProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far an order is. `waiting` are live workers that have not dropped everything yet."""

    waiting: tuple[Name, ...] = ()
    num_workers: Count = 0
    num_blocks: Count = 0
    finished_at: float | None = None


class OrderedDrop(msgspec.Struct, frozen=True):
    """`progress` is None before an index has begun."""

    drop: KvDrop
    progress: DropProgress | None = None

    @property
    def is_finished(self) -> bool:
        return self.progress is not None and self.progress.finished_at is not None


async def order(
    store: Store,
    tenant_id: str,
    reason: DropReason,
    now: float,
    kept_regions: tuple[str, ...] | None = (),
    region_class: str = "",
    *,
    created_at: float = 0.0,
    with_usage: bool = False,
) -> KvDrop:
    """Orders workers to drop the KV of a tenant; `now` is in Unix seconds. Raises
    StoreUnavailable.
    """
    drop = KvDrop(
        tenant_id=tenant_id,
        reason=reason,
        kept_regions=kept_regions,
        region_class=region_class,
        created_at=created_at,
        with_usage=with_usage,
        ordered_at=now,
    )
    arguments = msgspec.json.encode(drop), first_number(now)
    number = int(await store.evaluate(ORDER_LUA, [LAST, ORDERS], arguments))
    await _forget(store, now)
    return msgspec.structs.replace(drop, number=number)


async def _forget(store: Store, now: float) -> None:
    found = await store.hash_get(SITE_POSITIONS)
    confirmed = min((int(each) for each in found.values() if each.isdigit()), default=None)
    forgotten = [each.drop for each in _over(await orders(store), now, confirmed)]
    if not forgotten:
        return
    own = [each.number for each in forgotten if not is_at_site(each.tenant_id)]
    if own:
        await store.evaluate(RAISE_LUA, [FORGOTTEN], [max(own)])
    numbers = [str(each.number) for each in forgotten]
    await store.write([("HDEL", key, *numbers) for key in (ORDERS, PROGRESS)])


def first_number(now: float) -> int:
    """Returns the number before the first order of a Redis that has none."""
    return int(now * 1000)


async def last_number(store: Store) -> int:
    """Returns the number of the last order; 0: none. Raises StoreUnavailable."""
    return await _number(store, LAST)


async def last_forgotten(store: Store) -> int:
    """Returns the number of the last order on a tenant of this site that was forgotten; 0: none.
    Raises StoreUnavailable.
    """
    return await _number(store, FORGOTTEN)


async def _number(store: Store, key: str) -> int:
    found = await store.get(key)
    return int(found) if found is not None and found.isdigit() else 0


async def orders(store: Store) -> list[OrderedDrop]:
    """Returns the orders, oldest first, without unreadable ones. Raises StoreUnavailable."""
    ordered = await store.hash_get(ORDERS)
    progress = await store.hash_get(PROGRESS) if ordered else {}
    found = []
    for name, data in ordered.items():
        drop = _decoded(data, KvDrop)
        if drop is not None and name.isdigit():
            numbered = msgspec.structs.replace(drop, number=int(name))
            found.append(OrderedDrop(numbered, _decoded(progress.get(name, b""), DropProgress)))
    return sorted(found, key=lambda each: each.drop.number)


async def report(store: Store, number: int, progress: DropProgress) -> None:
    """Writes how far an order is. Raises StoreUnavailable."""
    await store.write([("HSET", PROGRESS, number, msgspec.json.encode(progress))])


def oldest_unfinished(found: list[OrderedDrop]) -> KvDrop | None:
    """Returns the oldest order that has not finished."""
    return next((each.drop for each in found if not each.is_finished), None)


def _over(found: list[OrderedDrop], now: float, confirmed: int | None) -> list[OrderedDrop]:
    """Returns what to forget: finished orders that are old, and the oldest of each site above
    MAX_ORDERS. All sites have confirmed the orders up to `confirmed`; None: there are none.
    """
    num_above = Counter(site_in(each.drop.tenant_id) for each in found)
    over = []
    for each in found:
        site = site_in(each.drop.tenant_id)
        is_above = num_above[site] > MAX_ORDERS
        num_above[site] -= 1
        if is_above or (each.is_finished and _is_old(each.drop, now, confirmed)):
            over.append(each)
    return over


def _is_old(drop: KvDrop, now: float, confirmed: int | None) -> bool:
    is_waiting = confirmed is not None and drop.number > confirmed
    return now - drop.ordered_at > (SITE_RETENTION_S if is_waiting else RETENTION_S)


def _decoded(data: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE:
        return None
