"""Adds stored responses and named prefixes of a backup that their tenants still allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from shared.backup import restore_scripts as scripts
from shared.backup.records import Stored, StoredPrefix, StoredResponse, StoredTenant
from shared.backup.retract import Retracted, allows_texts
from shared.block_hash import PUBLIC_TENANT_ID
from shared.store import Store
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import AllPrefixesFull, PinnedPrefix, TooManyPrefixes
from shared.tenancy.stored_responses import response_keys
from shared.tenancy.tenant import (
    RECORD_KEYS,
    TENANTS,
    TenantRecord,
    class_argument,
    decoded_tenant,
)


@dataclass
class Restored:
    """How many records of each kind a backup has, were added, and were taken back since."""

    found: Counter[str] = field(default_factory=Counter)
    added: Counter[str] = field(default_factory=Counter)
    retracted: Counter[str] = field(default_factory=Counter)


class TextRestore:
    """`now` is in Unix seconds. Without `writes`, nothing is changed."""

    def __init__(
        self,
        store: Store,
        tenants: Mapping[str, StoredTenant],
        retracted: Retracted,
        now: float,
        *,
        writes: bool,
    ) -> None:
        self._store = store
        self._tenants = tenants
        self._retracted = retracted
        self._now = now
        self._flag = int(writes)

    async def run(self, records: Iterable[Stored], result: Restored) -> None:
        """Adds the texts among the records of a backup, and counts them."""
        found = await self._store.hash_get(TENANTS)
        present = {name.decode(): decoded_tenant(data) for name, data in found.items()}
        for each in records:
            match each:
                case StoredResponse():
                    kind, added = "stored responses", partial(self._add_response, each)
                case StoredPrefix():
                    kind, added = "named prefixes", partial(self._add_prefix, each)
                case _:
                    continue
            result.found[kind] += 1
            record = self._writer(each.tenant_id, present)
            num_added = -1 if record is None else await added(record)
            result.added[kind] += max(num_added, 0)
            result.retracted[kind] += num_added < 0

    def _writer(
        self, tenant_id: str, present: dict[str, TenantRecord | None]
    ) -> TenantRecord | None:
        """Returns the record under which a text is stored; None: it may not be."""
        if tenant_id == PUBLIC_TENANT_ID:
            return TenantRecord(tenant_id=PUBLIC_TENANT_ID)
        stored = self._tenants.get(tenant_id)
        before = None if stored is None else decoded_tenant(stored.record)
        if stored is None or before is None:
            return None
        after = self._retracted.applied(stored)
        now = present.get(tenant_id)
        if now is None and not self._flag and after is not None:
            now = decoded_tenant(after.record)  # as it would be
        if after is None or now is None or not allows_texts(before, now):
            return None
        return now

    async def _add_response(self, stored: StoredResponse, record: TenantRecord) -> int:
        if stored.ends_at <= self._now:
            return 0
        arguments: list[str | bytes | float] = [
            *(self._flag, stored.response_id, stored.data, stored.previous),
            *(stored.used_at, stored.ends_at, self._now),
            *(stored.tenant_id, record.created_at, *_place(record)),
        ]
        keys = [*response_keys(stored.tenant_id), *RECORD_KEYS]
        return int(await self._store.evaluate(scripts.RESPONSE_LUA, keys, arguments))

    async def _add_prefix(self, stored: StoredPrefix, record: TenantRecord) -> int:
        """A tenant whose present ones leave no room keeps those."""
        prefix = msgspec.msgpack.decode(stored.data, type=PinnedPrefix)
        if prefix.expires_at is not None and prefix.expires_at <= self._now:
            return 0
        if not self._flag:
            return stored.name not in await pinned_prefix.entries(self._store, stored.tenant_id)
        region, _ = _place(record)
        try:
            return await pinned_prefix.save(
                self._store,
                prefix,
                self._now,
                replaces=pinned_prefix.NEW,
                owner=record,
                region=region,
                region_classes=[record.region_class],
            )
        except (TooManyPrefixes, AllPrefixesFull):
            return 0


def _place(record: TenantRecord) -> tuple[str, str]:
    """Returns a region and the classes of a writer that the record allows."""
    regions = record.allowed_regions or ("",)
    return regions[0], class_argument([record.region_class])
