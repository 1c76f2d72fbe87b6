"""Removal of a tenant, and of all that is held of it.

    remove ──▶ KvDrop "removed" ──▶ record, keys, stored data ──▶ finish: once more, after the last
               gateways end its requests, workers drop its KV             request has ended

An interrupted removal is repeated: the order says that it has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from shared.errors import ConfigError, Overloaded
from shared.store import Store
from shared.subjects import SITE_SEPARATOR, site_in
from shared.tenancy.deletion import kv_drops, retractions, tenant_data
from shared.tenancy.deletion.kv_drops import DropReason, KvDrop, OrderedDrop
from shared.tenancy.site_usage import TENANT_SITES, is_usage_deleted
from shared.tenancy.tenant import TENANTS, TenantRecord, check_tenant_id, decoded_tenant

SAME_CHANGE_S = 30.0  # gateways of one site find a change within this time
REMOVAL_S = 10  # gateways end requests of a removed tenant until then


class Whereabouts(msgspec.Struct, frozen=True, kw_only=True):
    """What this site holds of a tenant. `records` counts those of Redis by kind, `sites` may hold
    copies, `drops` are orders to drop its KV that have not finished.
    """

    records: dict[str, int]
    sites: tuple[str, ...] = ()
    drops: tuple[OrderedDrop, ...] = ()


def removing(tenant_id: str) -> str:
    """Returns the key that is there while requests of a removed tenant may still end: by Redis's
    clock, as operators' machines have different ones.
    """
    return f"hearth:kv_drops:removing:{tenant_id}"


class TenantWithdrawal:
    """Deletes what this site holds of a tenant of another site. `now` returns Unix seconds. Every
    gateway of the site finds the same change: one order is enough.
    """

    def __init__(self, store: Store, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now

    async def order(
        self, tenant_id: str, reason: DropReason, kept_regions: tuple[str, ...] = ()
    ) -> None:
        """Has workers that are not in `kept_regions` drop its KV. Raises StoreUnavailable, and
        Overloaded while so many orders of the other site have not finished.
        """
        found, site = await kv_drops.orders(self._store), site_in(tenant_id)
        drops, ordered = (each.drop for each in found), (tenant_id, reason, kept_regions)
        own = (e for e in drops if (e.tenant_id, e.reason, e.kept_regions) == ordered)
        # one of the future is of a gateway whose clock is ahead
        if all(abs(self._now() - each.ordered_at) > SAME_CHANGE_S for each in own):
            is_open = (not e.is_finished and site_in(e.drop.tenant_id) == site for e in found)
            if sum(is_open) >= kv_drops.MAX_OPEN:
                raise Overloaded("too many orders of this site are open here", retry_after_s=1.0)
            await kv_drops.order(self._store, tenant_id, reason, self._now(), kept_regions)

    async def delete(self, tenant_id: str, reason: DropReason) -> None:
        """Has all workers drop its KV, and deletes what Redis holds, but its usage, which its home
        site gets. Raises as `order` does.
        """
        await self.order(tenant_id, reason)
        await tenant_data.delete(self._store, tenant_id)

    async def delete_usage(self, tenant_id: str, created_at: Sequence[float]) -> None:
        """Deletes its usage, unless that of all tenants that were created then is deleted already:
        there may be a later one. Raises StoreUnavailable.
        """
        if not await is_usage_deleted(self._store, tenant_id, created_at):
            await tenant_data.delete_usage(self._store, tenant_id, created_at, self._now())


class TenantRemoval:
    """`now` returns Unix seconds. Every method raises StoreUnavailable."""

    def __init__(
        self, store: Store, now: Callable[[], float], retractions_file: Path | None = None
    ) -> None:
        """`retractions_file` is the list of `retractions.py` beside the one in Redis."""
        self._store = store
        self._now = now
        self._file = retractions_file

    async def remove(self, tenant_id: str, *, with_usage: bool) -> KvDrop:
        """Removes a tenant and what is stored of it, its usage only `with_usage`; its requests end
        and its KV is dropped. Raises ConfigError for one that does not exist.
        """
        data = (await self._store.hash_get(TENANTS)).get(check_tenant_id(tenant_id).encode())
        if data is None:
            drop = await self._begun(tenant_id)
            if drop is None:
                raise ConfigError(f"tenant {tenant_id!r} does not exist: see `hearth tenant list`")
            if with_usage and not drop.with_usage:  # sites get another order
                drop = await self._order(tenant_id, drop.created_at, with_usage=True)
            await self._delete(drop)
            return drop
        record = decoded_tenant(data)
        if record is None:  # whatever it was, it is not to come back
            record = TenantRecord(tenant_id=tenant_id, created_at=self._now())
        entry = retractions.of_removal(record, self._now(), with_usage=with_usage)
        unlisted = await retractions.list_entries(self._store, self._file, [entry])
        drop = await self._order(tenant_id, record.created_at, with_usage=with_usage)
        await self._store.write([("HDEL", TENANTS, tenant_id)])  # nothing is stored from now on
        await self._delete(drop)
        if unlisted is not None:
            raise unlisted
        return drop

    async def finish(self, drop: KvDrop) -> None:
        """Deletes what the last requests of a removed tenant have written."""
        if drop.tenant_id.encode() not in await self._store.hash_get(TENANTS):
            await self._delete(drop)

    async def whereabouts(self, tenant_id: str, sites: tuple[str, ...]) -> Whereabouts:
        """Returns what is held of a tenant whose record names `sites`, or of a removed one."""
        reported = await self._sites(tenant_id)
        found = await kv_drops.orders(self._store)
        return Whereabouts(
            records=await tenant_data.counts(self._store, tenant_id, self._now(), reported),
            sites=sites,
            drops=tuple(
                each for each in found if each.drop.tenant_id == tenant_id and not each.is_finished
            ),
        )

    async def _begun(self, tenant_id: str) -> KvDrop | None:
        found = [each.drop for each in await kv_drops.orders(self._store)]
        own = [each for each in found if (each.tenant_id, each.reason) == (tenant_id, "removed")]
        return own[-1] if own else None

    async def _sites(self, tenant_id: str) -> list[str]:
        """Returns the sites that the tenant has ever named."""
        named = (each.decode() for each in await self._store.hash_get(TENANT_SITES))
        parts = (each.rpartition(SITE_SEPARATOR) for each in named)
        return sorted(site for name, _, site in parts if name == tenant_id)

    async def _order(self, tenant_id: str, created_at: float, *, with_usage: bool) -> KvDrop:
        await self._store.write([("SET", removing(tenant_id), 1, "EX", REMOVAL_S)])
        return await kv_drops.order(
            self._store,
            tenant_id,
            "removed",
            self._now(),
            created_at=created_at,
            with_usage=with_usage,
        )

    async def _delete(self, drop: KvDrop) -> None:
        await tenant_data.delete(self._store, drop.tenant_id)
        if drop.with_usage:
            sites = await self._sites(drop.tenant_id)
            await tenant_data.delete_usage(
                self._store, drop.tenant_id, [drop.created_at], self._now(), sites
            )
