"""Watches for tenants of this site whose regions change, or that are removed.

A change is found by the version that every command on tenants increases, and not in the records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import structlog

from services.gateway.streams.changed_regions import ChangedRegions
from services.gateway.tenancy.errors import NoRegionAllowed
from services.gateway.tenancy.region_rule import RegionRule
from shared.background import failing_alone
from shared.clock import Clock
from shared.errors import ConfigError
from shared.store import Store, StoreUnavailable
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.tenant import (
    GENERATION,
    TENANTS,
    TenantRecord,
    decoded_tenant,
    tenant_of,
)

log = structlog.get_logger(__name__)

POLL_S = 0.25  # as a heartbeat

Regions = tuple[tuple[str, ...] | None, str]  # those that are allowed, and the class
OnChange = Callable[[str, TenantRecord | None], None]


def changed_regions(
    tenant_id: str, record: TenantRecord | None, rule: RegionRule
) -> ChangedRegions:
    """Returns what the record, None if it is gone, means for the tenant's open requests at the
    gateway of `rule`.
    """
    if record is None:  # the removal itself ends them
        return ChangedRegions(tenant_id, is_gone=True)
    named = rule.named(record)
    changed = ChangedRegions(
        tenant_id,
        named.allowed_regions or (),
        named.region_class,
        is_gone=rule.has_no_region(record),
    )
    if reason := rule.refused(record):
        moved = NoRegionAllowed(f"the regions of this tenant have changed: {reason}")
        return replace(changed, error=moved)
    return changed


class RegionChanges:
    """Calls `on_change(tenant_id, record)` after each change; the record is None if it is gone."""

    def __init__(self, store: Store, clock: Clock, on_change: OnChange) -> None:
        self._store = store
        self._clock = clock
        self._on_change = on_change
        self._version = -1  # -1: no record has been read
        self._generation: bytes | None = None  # of Redis's records, which may be lost and made anew
        self._known: dict[str, Regions] = {}

    async def run(self) -> None:
        while True:
            with failing_alone("region_changes_not_read"):
                try:
                    await self.poll()
                except StoreUnavailable as error:  # the next round reads what has changed since
                    log.debug("region_changes_not_read", reason=error.message)
            await self._clock.sleep(POLL_S)

    async def poll(self) -> None:
        """Reads what has changed since the last call. Raises StoreUnavailable."""
        generation = await self._store.get(GENERATION)
        changes = await pinned_prefix.changes(self._store, self._version)
        is_other, self._generation = generation != self._generation, generation
        if changes.version == self._version and not is_other:
            return
        if changes.tenants is None or self._version < 0 or is_other:
            await self._read_all()
        else:
            for tenant_id in changes.tenants:
                await self._read(tenant_id)
        self._version = changes.version

    async def _read_all(self) -> None:
        found = await self._store.hash_get(TENANTS)
        records = {name.decode(errors="replace"): decoded_tenant(d) for name, d in found.items()}
        # those that are not there are not removed: Redis may have been emptied
        self._known = {name: each for name, each in self._known.items() if name in records}
        for tenant_id, record in records.items():
            if record is not None:
                self._take(tenant_id, record, is_first=self._version < 0)

    async def _read(self, tenant_id: str) -> None:
        try:
            record = await tenant_of(self._store, tenant_id)
        except ConfigError as error:  # unreadable: its next requests fail
            log.warning("tenant_unreadable", tenant=tenant_id, reason=error.message)
            return
        self._take(tenant_id, record)

    def _take(self, tenant_id: str, record: TenantRecord | None, *, is_first: bool = False) -> None:
        if record is None:
            is_changed = self._known.pop(tenant_id, None) is not None
        else:
            regions = record.allowed_regions, record.region_class
            # a tenant that is new here has no requests yet, unless it was added just now
            is_changed = not is_first and self._known.get(tenant_id) != regions
            self._known[tenant_id] = regions
        if is_changed:
            with failing_alone("region_change_not_applied", tenant=tenant_id):
                self._on_change(tenant_id, record)
