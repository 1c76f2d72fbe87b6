"""Writes a backup into an empty Redis, or adds to one in use what it lacks.

    backup ─▶ without what lists take back ─▶ tenants and keys, in one step ─▶ the rest ─▶ texts

What Redis has stays as it is; of a key's end the earlier one counts, of usage the greater sum. An
empty Redis may have usage since its loss: gateways serve the keys that they know, so sums are
added. A restore that was interrupted is repeated: each step adds only what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from shared.backup import restore_scripts as scripts
from shared.backup.backup_file import BackupFile
from shared.backup.records import (
    StoredDrop,
    StoredHash,
    StoredKey,
    StoredLines,
    StoredRetractions,
    StoredTenant,
    StoredUsage,
    StoredValue,
)
from shared.backup.restore_texts import Restored, TextRestore
from shared.backup.retract import Retracted
from shared.errors import ConfigError
from shared.model_registry.record import REGISTRY, REGISTRY_VERSION
from shared.store import Command, Store, packed_for_lua
from shared.tenancy.deletion import kv_drops, retractions
from shared.tenancy.deletion.kv_drops import DropReason
from shared.tenancy.deletion.retractions import RetentionChanged, Retraction, TenantRemoved
from shared.tenancy.model_alias import ALIASES, aliases_of
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.tenant import (
    GENERATION,
    TENANTS,
    api_key_record,
    decoded_tenant,
    keys_of,
)

MAX_TRIES = 16
STEP_BYTES = 4 << 20  # of tenants
MARK_S = 30 * 86_400
_OTHER = (
    "Redis holds records of another beginning ({present}) than the backup ({other}): another "
    "cluster's, or tenants were added to an empty Redis before the restore; --force adds to them"
)


class Restore:
    """Restores one backup. `now` is in Unix seconds. Without `writes`, nothing is changed. Every
    method raises ConfigError and StoreUnavailable.
    """

    def __init__(
        self, store: Store, backup: BackupFile, now: float, *, writes: bool, is_forced: bool
    ) -> None:
        self._store = store
        self._backup = backup
        self._now = now
        self._flag = int(writes)
        self._is_forced = is_forced
        self._tenants: dict[str, StoredTenant] = {}
        self._given: list[Retraction] = []  # of the backup and of files
        self._retracted = Retracted([], 0.0)
        self._names = set[str]()  # tenants after the restore
        self.result = Restored()

    async def run(self, listed: Iterable[Retraction]) -> Restored:
        """`listed`: what files take back."""
        header = self._backup.header
        present = (await self._store.get(GENERATION) or b"").decode()
        if present not in ("", header.generation) and not self._is_forced:
            raise ConfigError(_OTHER.format(present=present, other=header.generation))
        self._given = list(listed)
        for each in self._backup.records():
            match each:
                case StoredTenant():
                    self._tenants[each.tenant_id] = each
                case StoredRetractions():
                    self._given += each.entries
        await self._write_counters()
        mark = f"hearth:restored:{header.backup_id}"
        adds = not present or bool(await self._store.hash_get(mark))
        if adds and self._flag:
            await self._store.write([("HSET", mark, "", 1), ("EXPIRE", mark, MARK_S)])
        await self._restore_tenants()
        await self._order_drops()
        for each in self._backup.records():
            match each:
                case StoredUsage():
                    await self._restore_usage(each, mark, adds=adds)
                case StoredHash() | StoredValue() | StoredLines() | StoredDrop():
                    await self._restore_shared(each)
        texts = TextRestore(
            self._store, self._tenants, self._retracted, self._now, writes=bool(self._flag)
        )
        await texts.run(self._backup.records(), self.result)
        return self.result

    async def _write_counters(self) -> None:
        keys = [pinned_prefix.VERSION_KEY, REGISTRY_VERSION, kv_drops.LAST]
        number = kv_drops.first_number(self._now)
        await self._store.evaluate(scripts.COUNTERS_LUA, keys, [self._flag, number])

    # ── tenants ──────────────────────────────────────────────────────────────────────────────────

    async def _restore_tenants(self) -> None:
        """Adds tenants with their keys. Those that an operator changes meanwhile are read again."""
        left = set(self._tenants)
        for _ in range(MAX_TRIES):
            present = await self._store.hash_get(TENANTS)
            # read after the tenants: of one that is missing, the removal is listed by now
            await self._read_retractions()
            steps = list(self._steps(left, present))
            self._names |= {name.decode() for name in present}
            self._names |= {tenant.tenant_id for step in steps for tenant, _ in step}
            left = set()
            for step in steps:
                left |= await self._add_tenants(step)
            if not left:
                break
        else:
            raise ConfigError(f"tenants are modified all the time: {', '.join(sorted(left))}")
        if not steps:  # without tenants, Redis has records from now on, too
            await self._add_tenants([])
        self._count_tenants()
        await self._write_retractions()

    def _count_tenants(self) -> None:
        for each in self._tenants.values():
            self.result.found.update(
                {"tenants": 1, "keys": len(each.keys), "tenants' aliases": len(each.aliases)}
            )
            now = self._retracted.applied(each)
            if now is None:
                self.result.retracted.update({"tenants": 1, "keys": len(each.keys)})
            else:
                pairs = zip(each.keys, now.keys, strict=True)
                self.result.retracted["keys"] += sum(a.record != b.record for a, b in pairs)

    async def _read_retractions(self) -> None:
        listed = await retractions.read_listed(self._store)
        entries = retractions.united(self._given, listed)
        self._retracted = Retracted(entries, self._backup.header.made_at)

    def _steps(
        self, names: Iterable[str], present: Any
    ) -> Iterator[list[tuple[StoredTenant, bytes]]]:
        part, size = list[tuple[StoredTenant, bytes]](), 0
        for name in sorted(names):
            tenant = self._retracted.applied(self._tenants[name])
            before = present.get(name.encode(), b"")
            if tenant is None or _is_another(tenant.record, before):
                continue
            part.append((tenant, before))
            size += len(tenant.record) + 512 * len(tenant.keys)
            if size > STEP_BYTES:
                yield part
                part, size = [], 0
        if part:
            yield part

    async def _add_tenants(self, step: Sequence[tuple[StoredTenant, bytes]]) -> set[str]:
        """Returns the tenants that have changed since they were read."""
        rows = [_row(tenant, before) for tenant, before in step]
        keys = [TENANTS, GENERATION, api_key_record("")]
        generation = self._backup.header.generation
        reply = await self._store.evaluate(
            scripts.TENANTS_LUA, keys, [self._flag, generation, packed_for_lua(rows)]
        )
        num_tenants, num_keys, num_aliases, changed = reply
        self.result.added.update(
            {"tenants": num_tenants, "keys": num_keys, "tenants' aliases": num_aliases}
        )
        names = {each.decode() for each in changed}
        if self._flag:
            for tenant, before in step:
                if not before and tenant.tenant_id not in names:
                    await pinned_prefix.record_change(self._store, tenant.tenant_id)
        return names

    # ── what has been taken back ─────────────────────────────────────────────────────────────────

    async def _write_retractions(self) -> None:
        known = {each.entry_id for each in await retractions.read_listed(self._store)}
        new = [each for each in self._retracted.entries if each.entry_id not in known]
        self.result.added["retractions"] += len(new)
        self.result.found["retractions"] += len(self._retracted.entries)
        if new and self._flag:
            commands: list[Command] = [retractions.entry_command(each) for each in new]
            await self._store.write(commands)

    async def _order_drops(self) -> None:
        """Has workers drop the KV that operators had ordered them to drop since the backup."""
        for each in self._retracted.entries:
            if not self._retracted.is_after(each):
                continue
            match each:
                case TenantRemoved():
                    await self._order_drop(
                        each.tenant_id,
                        "removed",
                        created_at=each.created_at,
                        with_usage=each.with_usage,
                    )
                case RetentionChanged():
                    if each.is_zero_retention:
                        await self._order_drop(each.tenant_id, "zero_retention")
                    if each.allowed_regions is not None or each.region_class:
                        limits = each.allowed_regions, each.region_class
                        await self._order_drop(each.tenant_id, "regions", *limits)

    async def _order_drop(
        self,
        tenant_id: str,
        reason: DropReason,
        kept_regions: tuple[str, ...] | None = (),
        region_class: str = "",
        *,
        created_at: float = 0.0,
        with_usage: bool = False,
    ) -> None:
        if (tenant_id in self._names) != (reason != "removed"):
            return
        given = (tenant_id, reason, kept_regions, region_class)
        for each in await kv_drops.orders(self._store):
            drop = each.drop
            if given == (drop.tenant_id, drop.reason, drop.kept_regions, drop.region_class):
                return
        self.result.added["orders to drop KV"] += 1
        if self._flag:
            await kv_drops.order(
                self._store,
                tenant_id,
                reason,
                self._now,
                kept_regions,
                region_class,
                created_at=created_at,
                with_usage=with_usage,
            )

    # ── what is not of one tenant ────────────────────────────────────────────────────────────────

    async def _restore_shared(
        self, stored: StoredHash | StoredValue | StoredLines | StoredDrop
    ) -> None:
        match stored:
            case StoredDrop(drop=drop):
                limits = drop.kept_regions, drop.region_class
                await self._order_drop(
                    drop.tenant_id,
                    drop.reason,
                    *limits,
                    created_at=drop.created_at,
                    with_usage=drop.with_usage,
                )
                return
            case StoredHash(key=key, fields=fields):
                script, number = scripts.FIELDS_LUA, len(fields)
                arguments: list[Any] = [part for each in fields for part in each]
            case StoredValue(key=key, value=value):
                script, number, arguments = scripts.VALUE_LUA, 1, [value]
            case StoredLines(key=key, lines=lines):
                script, number = scripts.LINES_LUA, len(lines)
                arguments = [packed_for_lua(lines)]
        added = await self._store.evaluate(script, [key], [self._flag, *arguments])
        kind = _KINDS.get(key, key.removeprefix("hearth:").replace("_", " "))
        self.result.found[kind] += number
        self.result.added[kind] += added
        if key == REGISTRY and added and self._flag:
            await self._store.write([("INCRBY", REGISTRY_VERSION, 1)])

    async def _restore_usage(self, usage: StoredUsage, mark: str, *, adds: bool) -> None:
        self.result.found["days of usage"] += 1
        tenant = self._tenants.get(usage.tenant_id)
        record = None if tenant is None else decoded_tenant(tenant.record)
        created_at = 0.0 if record is None else record.created_at
        removal = self._retracted.removal_of(usage.tenant_id, created_at)
        if removal is not None and removal.with_usage:
            self.result.retracted["days of usage"] += 1
            return
        pairs = (part for each in usage.counts for part in each)
        arguments = [self._flag, int(adds), usage.ttl_s or 400 * 86_400, *pairs]
        self.result.added["days of usage"] += await self._store.evaluate(
            scripts.USAGE_LUA, [usage.key, mark], arguments
        )


_KINDS = {REGISTRY: "models", ALIASES: "aliases", "hearth:audit": "audit"}


def _is_another(record: bytes, present: bytes) -> bool:
    """Whether Redis has a later tenant of the same name, to which the keys do not belong."""
    own, other = decoded_tenant(record), decoded_tenant(present) if present else None
    return own is not None and other is not None and own.created_at != other.created_at


def _row(tenant: StoredTenant, before: bytes) -> list[Any]:
    lists = [keys_of(tenant.tenant_id), aliases_of(tenant.tenant_id)]
    aliases = [part for each in tenant.aliases for part in each]
    return [
        *(tenant.tenant_id, tenant.record, before, *lists, aliases),
        [_key_row(each) for each in tenant.keys],
    ]


def _key_row(key: StoredKey) -> list[Any]:
    fields = msgspec.structs.asdict(key.record)
    pairs = [str(part) for each in fields.items() if each[1] is not None for part in each]
    return [key.key_id, key.digest, key.ttl_s or 0, pairs]
