"""Orders to drop the KV of tenants on workers, and how far they are.

    hearth:kv_drops            hash: number → a KvDrop as JSON
    hearth:kv_drops:progress   hash: number → a DropProgress as JSON
    hearth:kv_drops:last       the number of the last order
    hearth:kv_drops:sites      hash: see site_drops.py

    command, gateway ──KvDrop──▶ kv_index ──DropTenantKv──▶ every worker
                                 DropProgress ◀──TenantKvDropped──┘

An order stays for RETENTION_S: a worker that was silent gets it when it is back. One that a linked
site has not confirmed stays for SITE_RETENTION_S.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from shared.messages import Count, Name
from shared.store import Store
from shared.transport.wire_errors import UNREADABLE

ORDERS = "hearth:kv_drops"
PROGRESS = "hearth:kv_drops:progress"
LAST = "hearth:kv_drops:last"
SITE_POSITIONS = "hearth:kv_drops:sites"
RETENTION_S = 86_400.0
SITE_RETENTION_S = 30 * RETENTION_S
MAX_ORDERS = 1000
T = TypeVar("T")

# zero_retention: its requests go on, and leave nothing. removed: its requests end. regions: only
# workers outside of its regions drop its KV.
DropReason = Literal["zero_retention", "removed", "regions"]

# KEYS: the last number, the orders. ARGV: an order. Returns its number. Both are written at once:
# whoever reads the last number finds all orders up to it.
ORDER_LUA = """
local number = redis.call('INCRBY', KEYS[1], 1)
redis.call('HSET', KEYS[2], number, ARGV[1])
return number
"""


class KvDrop(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An order; its field of the hash is its number. Workers in `kept_regions` (None: any), and in
    the region class, if there is one, keep the KV of a tenant whose regions have changed. Times are
    Unix seconds.
    """

    number: Count = 0
    tenant_id: Name
    reason: DropReason
    kept_regions: Annotated[tuple[Name, ...], Meta(max_length=4096)] | None = ()
    region_class: Name = ""
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
) -> KvDrop:
    """Orders workers to drop the KV of a tenant; `now` is in Unix seconds. Raises
    StoreUnavailable.
    """
    drop = KvDrop(
        tenant_id=tenant_id,
        reason=reason,
        kept_regions=kept_regions,
        region_class=region_class,
        ordered_at=now,
    )
    number = int(await store.evaluate(ORDER_LUA, [LAST, ORDERS], [msgspec.json.encode(drop)]))
    await _forget(store, now)
    return msgspec.structs.replace(drop, number=number)


async def _forget(store: Store, now: float) -> None:
    found = await store.hash_get(SITE_POSITIONS)
    confirmed = min((int(each) for each in found.values() if each.isdigit()), default=None)
    forgotten = [str(each.drop.number) for each in _over(await orders(store), now, confirmed)]
    if forgotten:
        await store.write([("HDEL", key, *forgotten) for key in (ORDERS, PROGRESS)])


async def last_number(store: Store) -> int:
    """Returns the number of the last order; 0: none. Raises StoreUnavailable."""
    found = await store.get(LAST)
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
    """Returns what to forget: finished orders that are old, and the oldest above MAX_ORDERS. All
    sites have confirmed the orders up to `confirmed`; None: there are none.
    """
    num_above = max(0, len(found) - MAX_ORDERS)
    return [
        each
        for index, each in enumerate(found)
        if index < num_above or (each.is_finished and _is_old(each.drop, now, confirmed))
    ]


def _is_old(drop: KvDrop, now: float, confirmed: int | None) -> bool:
    is_waiting = confirmed is not None and drop.number > confirmed
    return now - drop.ordered_at > (SITE_RETENTION_S if is_waiting else RETENTION_S)


def _decoded(data: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE:
        return None
