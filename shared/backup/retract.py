"""Takes out of a backup what has been taken back since. No I/O.

Every removal and every end of a key counts, whenever it was: a tenant or key is named with its
creation. A change of retention counts if it may be later than the backup: clocks of operators'
machines may differ by CLOCKS_S.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import structs

from shared.backup.records import StoredKey, StoredTenant
from shared.tenancy.deletion.retractions import (
    KeyEnded,
    RetentionChanged,
    Retraction,
    TenantRemoved,
)
from shared.tenancy.tenant import TenantRecord, decoded_tenant

CLOCKS_S = 60.0


class Retracted:
    """What a list takes back of a backup that was made at `made_at`, in Unix seconds."""

    def __init__(self, entries: Iterable[Retraction], made_at: float) -> None:
        """`entries`: in the order of their times."""
        self.entries = list(entries)
        self._made_at = made_at
        self._removed: dict[str, TenantRemoved] = {}
        self._ended: dict[str, list[KeyEnded]] = {}
        self._retention: dict[str, RetentionChanged] = {}
        for each in self.entries:
            match each:
                case TenantRemoved():
                    before = self._removed.get(each.tenant_id)
                    if before is None or before.created_at <= each.created_at:
                        self._removed[each.tenant_id] = each
                case KeyEnded():
                    self._ended.setdefault(each.digest, []).append(each)
                case RetentionChanged() if each.at >= made_at - CLOCKS_S:
                    self._retention[each.tenant_id] = each

    def removal_of(self, tenant_id: str, created_at: float) -> TenantRemoved | None:
        """Returns the removal of a tenant with this creation, if it has been removed."""
        found = self._removed.get(tenant_id)
        return found if found is not None and found.created_at >= created_at else None

    def is_after(self, entry: Retraction) -> bool:
        """Whether an entry may be later than the backup."""
        return entry.at >= self._made_at - CLOCKS_S

    def applied(self, tenant: StoredTenant) -> StoredTenant | None:
        """Returns the tenant with its keys ended and its retention as it is now; None if it has
        been removed. An unreadable record is as it was.
        """
        record = decoded_tenant(tenant.record)
        keys = tuple(self._key(each) for each in tenant.keys)
        if record is None:
            return structs.replace(tenant, keys=keys)
        if self.removal_of(tenant.tenant_id, record.created_at) is not None:
            return None
        return structs.replace(tenant, keys=keys, record=self._record(record, tenant.record))

    def _key(self, key: StoredKey) -> StoredKey:
        for each in self._ended.get(key.digest, ()):
            if key.record.created_at > each.created_at:  # a later client of this name
                continue
            ended = getattr(key.record, each.field)
            ends_at = each.ends_at if ended is None else min(ended, each.ends_at)
            key = structs.replace(key, record=structs.replace(key.record, **{each.field: ends_at}))
        return key

    def _record(self, record: TenantRecord, data: bytes) -> bytes:
        """Returns the record's JSON; unchanged, it keeps fields that this release does not know."""
        change = self._retention.get(record.tenant_id)
        if change is None or change.created_at != record.created_at:
            return data
        changed = structs.replace(
            record,
            is_zero_retention=change.is_zero_retention,
            allowed_regions=change.allowed_regions,
            region_class=change.region_class,
        )
        return data if changed == record else msgspec.json.encode(changed)


def allows_texts(before: TenantRecord, now: TenantRecord) -> bool:
    """Whether texts of a backup, in which the tenant's record is `before`, may be stored under its
    present record. A text does not tell in which region it was stored.
    """
    if now.is_zero_retention or before.created_at != now.created_at:
        return False
    if now.region_class not in ("", before.region_class):
        return False
    if now.allowed_regions is None:
        return True
    return before.allowed_regions is not None and set(before.allowed_regions) <= {
        *now.allowed_regions
    }
