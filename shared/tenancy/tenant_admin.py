"""Administration of tenants, for the commands `hearth tenant`, `hearth usage`, `hearth api-key`.

Every operation is one step in Redis, or its steps are ordered so that it can stop anywhere: an
interrupted rotation leaves both keys valid, and a revocation is never undone.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from shared.clock import MonotonicClock
from shared.errors import ConfigError
from shared.store import RedisStore, Store
from shared.subjects import SITE_SEPARATOR
from shared.tenancy import stored_responses
from shared.tenancy.declared_classes import check_declared
from shared.tenancy.deletion import kv_drops, retractions
from shared.tenancy.deletion.tenant_removal import REMOVAL_S, removing
from shared.tenancy.home_tenants import name_sites
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.rate_limit import (
    APPLY_LUA,
    LEASE_S,
    LimitCommand,
    LimitState,
    enforced_limits,
    to_limit_state,
)
from shared.tenancy.site_admin import check_bounds, check_sites
from shared.tenancy.site_usage import TENANT_SITES, usage_at
from shared.tenancy.tenant import (
    GENERATION,
    TENANTS,
    USAGE_KINDS,
    ApiKeyRecord,
    TenantRecord,
    UsageRow,
    api_key_record,
    check_tenant_id,
    client_digest,
    decoded_tenant,
    digest_of,
    is_client,
    keys_of,
    meter_of,
    open_requests_of,
    usage_of,
)
from shared.tls import TlsFiles
from shared.transport.wire_errors import UNREADABLE

KeyStanding = Literal["unknown", "valid", "ended"]
KEY_ID_CHARS = 12
FORGET_S = 30 * 86_400  # retention of the record of an ended key
MAX_SWAPS = 16
BOUNDS = frozenset({"allowed_regions", "region_class"})  # fields of a record

# KEYS: a hash. ARGV: a field, its expected value (empty: no value), its new value.
SWAP = """
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""


# KEYS: all tenants, the generation, a key's record, the tenant's keys. ARGV: the tenant, its record
# if it is new (empty: it is not), a generation, and the key's id, digest and time. Returns why it
# fails, which another operator may have caused just now, or ''.
ADD_KEY_LUA = """
if ARGV[2] ~= '' then redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2]) end
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 'unknown' end
if (redis.call('HGET', KEYS[3], 'tenant_id') or ARGV[1]) ~= ARGV[1] then return 'taken' end
redis.call('SETNX', KEYS[2], ARGV[3])
redis.call('HSET', KEYS[3], 'tenant_id', ARGV[1], 'key_id', ARGV[4], 'created_at', ARGV[6])
redis.call('HSET', KEYS[4], ARGV[4], ARGV[5])
return ''
"""


def new_api_key() -> str:
    return f"hearth-{secrets.token_urlsafe(24)}"


def key_id_of(api_key: str) -> str:
    return digest_of(api_key)[:KEY_ID_CHARS]


async def store_api_key(
    store: Store, api_key: str, tenant_id: str, *, created_at: float = 0.0
) -> None:
    """Adds a key, and creates its tenant if needed. Raises StoreUnavailable."""
    record = TenantRecord(tenant_id=tenant_id, created_at=created_at)
    await _add_key(store, key_id_of(api_key), digest_of(api_key), record, is_new=True)


async def _add_key(
    store: Store, key_id: str, digest: str, record: TenantRecord, *, is_new: bool
) -> None:
    """Adds a key that is as old as `record`. Raises ConfigError for a tenant that does not exist,
    unless it is created: `is_new`; and for a key of another one.
    """
    tenant_id = record.tenant_id
    keys = [TENANTS, GENERATION, api_key_record(digest), keys_of(tenant_id)]
    new = msgspec.json.encode(record) if is_new else b""
    arguments = (tenant_id, new, secrets.token_hex(8), key_id, digest, record.created_at)
    match await store.evaluate(ADD_KEY_LUA, keys, arguments):
        case b"unknown":
            raise _unknown(tenant_id)
        case b"taken":
            raise ConfigError(f"{key_id!r} belongs to another tenant")
    if is_new:  # it may have been another one before
        await pinned_prefix.record_change(store, tenant_id)


async def save_api_key(redis_url: str, api_key: str, tenant_id: str) -> None:
    """Stores an API key of a tenant over a new connection. Raises StoreUnavailable."""
    async with _connected(redis_url) as store:
        await store_api_key(store, api_key, tenant_id, created_at=time.time())


async def standing_of(redis_url: str, api_key: str, tenant_id: str) -> KeyStanding:
    """Returns an API key's standing over a new connection. Raises StoreUnavailable, and ConfigError
    for a key of another tenant.
    """
    async with _connected(redis_url) as store:
        return await TenantAdmin(store, time.time).standing(tenant_id, api_key)


async def save_client(redis_url: str, client_id: str, tenant_id: str) -> None:
    """Adds a client to a tenant over a new connection. Raises StoreUnavailable."""
    async with _connected(redis_url) as store:
        await TenantAdmin(store, time.time).add_client(tenant_id, client_id)


@asynccontextmanager
async def _connected(redis_url: str) -> AsyncIterator[Store]:
    tls = TlsFiles.of_environ("REDIS", os.environ)
    store = RedisStore(redis_url, MonotonicClock(), timeout_s=2.0, tls=tls)
    try:
        yield store
    finally:
        await store.close()


class TenantAdmin:
    """Changes tenants and keys. `now` returns unix seconds. Every method raises StoreUnavailable if
    Redis does not answer, and ConfigError for a tenant or key that does not exist or has an
    unreadable record.
    """

    def __init__(
        self, store: Store, now: Callable[[], float], retractions_file: Path | None = None
    ) -> None:
        """`retractions_file` is the list of `retractions.py` beside the one in Redis."""
        self._store = store
        self._now = now
        self._file = retractions_file

    # ── tenants ──────────────────────────────────────────────────────────────────────────────────

    async def add(self, tenant_id: str, changes: Mapping[str, Any], api_key: str) -> TenantRecord:
        record = TenantRecord(tenant_id=check_tenant_id(tenant_id), created_at=self._now())
        await self._check_removed(tenant_id)
        record = _changed(record, changes)
        await check_declared(self._store, record.region_class)
        await check_bounds(self._store, record)
        await self._name_sites(tenant_id, record.sites)
        if not await self._swap(tenant_id, b"", msgspec.json.encode(record)):
            raise ConfigError(
                f"the tenant {tenant_id!r} exists already: `hearth tenant limits` changes it, "
                "`hearth api-key` adds a key"
            )
        await self._add_key(key_id_of(api_key), digest_of(api_key), tenant_id)
        await pinned_prefix.record_change(self._store, tenant_id)  # it may have been another one
        return record

    async def _check_removed(self, tenant_id: str) -> None:
        """Raises ConfigError while requests of a removed tenant of this name may still end."""
        found = [each for each in await kv_drops.orders(self._store) if not each.is_finished]
        unfinished = {each.drop.tenant_id for each in found if each.drop.reason == "removed"}
        if tenant_id in unfinished or await self._store.get(removing(tenant_id)) is not None:
            raise ConfigError(
                f"the tenant {tenant_id!r} is being removed: add it again in {REMOVAL_S} s"
            )

    async def all(self) -> dict[str, TenantRecord | None]:
        """Records by id, sorted; None for an unreadable record."""
        found = await self._store.hash_get(TENANTS)
        return {name.decode(): decoded_tenant(data) for name, data in sorted(found.items())}

    async def one(self, tenant_id: str) -> TenantRecord:
        return (await self._read(tenant_id))[0]

    async def change(self, tenant_id: str, changes: Mapping[str, Any]) -> TenantRecord:
        """Applies `changes`; concurrent changes by two operators are both preserved. Stored
        responses and prefixes that the tenant no longer allows are deleted; repeated after a
        failure, the same changes delete them again.
        """
        for _ in range(MAX_SWAPS):
            record, before = await self._read(tenant_id)
            changed = _changed(record, changes)
            if "region_class" in changes:
                await check_declared(self._store, changed.region_class)
            if BOUNDS & changes.keys():
                await check_bounds(self._store, changed)
            await self._name_sites(tenant_id, sorted({*changed.sites} - {*record.sites}))
            entries = self._retention_entries(record, changed)
            unlisted = await retractions.list_entries(self._store, self._file, entries)
            if await self._swap(tenant_id, before, msgspec.json.encode(changed)):
                await self._apply_retention(record, changed, changes)
                if unlisted is not None:
                    raise unlisted
                return changed
        raise ConfigError(f"the tenant {tenant_id!r} was modified concurrently; try again")

    def _retention_entries(
        self, before: TenantRecord, after: TenantRecord
    ) -> list[retractions.Retraction]:
        was = before.is_zero_retention, before.allowed_regions, before.region_class
        now = after.is_zero_retention, after.allowed_regions, after.region_class
        return [] if was == now else [retractions.of_retention(after, self._now())]

    async def _name_sites(self, tenant_id: str, sites: Sequence[str]) -> None:
        await check_sites(self._store, sites)
        await name_sites(self._store, tenant_id, sites)

    async def _apply_retention(
        self, before: TenantRecord, after: TenantRecord, changes: Mapping[str, Any]
    ) -> None:
        """A record does not tell in which region it was stored: a region less deletes all."""
        tenant_id, regions = after.tenant_id, after.allowed_regions
        named = changes.get("allowed_regions") is not None or bool(changes.get("region_class"))
        is_repeated = named and (regions, after.region_class) == (
            *(before.allowed_regions, before.region_class),
        )
        has_all = _covers(regions, before.allowed_regions) and not is_repeated
        has_all = has_all and after.region_class in ("", before.region_class)
        if after.is_zero_retention or not has_all:
            await stored_responses.delete_all(self._store, tenant_id)
            await pinned_prefix.delete_all(self._store, tenant_id)
        if not has_all:
            await kv_drops.order(
                self._store,
                tenant_id,
                "regions",
                self._now(),
                kept_regions=regions,
                region_class=after.region_class,
            )
        if after.is_zero_retention and (not before.is_zero_retention or _switches_on(changes)):
            await kv_drops.order(self._store, tenant_id, "zero_retention", self._now())
        limits_before = before.allowed_regions, before.region_class
        if (after.allowed_regions, after.region_class) != limits_before:
            await pinned_prefix.record_change(self._store, tenant_id)

    async def state(self, tenant: TenantRecord) -> LimitState:
        """Returns the current use of the limits that gateways enforce."""
        command = msgspec.json.encode(LimitCommand(limits=enforced_limits(tenant), lease_s=LEASE_S))
        keys = [meter_of(tenant.tenant_id), open_requests_of(tenant.tenant_id)]
        return to_limit_state(await self._store.evaluate(APPLY_LUA, keys, [command]))

    # ── keys ─────────────────────────────────────────────────────────────────────────────────────

    async def keys(self, tenant_id: str) -> list[ApiKeyRecord]:
        """Returns the tenant's keys, oldest first."""
        digests = await self._digests(tenant_id)
        found = [await self._key(key_id, digest) for key_id, digest in digests.items()]
        return sorted((each for each in found if each is not None), key=lambda k: k.created_at)

    async def standing(self, tenant_id: str, api_key: str) -> KeyStanding:
        """Returns whether Redis has never known the key for this tenant, accepts it, or does no
        more. Raises ConfigError for a key of another tenant.
        """
        key_id = key_id_of(api_key)
        key = await self._key(key_id, digest_of(api_key))
        if key is None:
            return "ended" if key_id in await self._digests(tenant_id) else "unknown"
        if key.tenant_id != tenant_id:
            raise ConfigError(f"the API key {key_id} belongs to another tenant than {tenant_id!r}")
        return "valid" if self._is_valid(key) else "ended"

    async def add_key(self, tenant_id: str, api_key: str) -> str:
        """Adds a key, and creates its tenant if needed. Returns the key's id."""
        if check_tenant_id(tenant_id).encode() in await self._store.hash_get(TENANTS):
            await self._add_key(key_id_of(api_key), digest_of(api_key), tenant_id)
        else:
            await self._check_removed(tenant_id)
            await store_api_key(self._store, api_key, tenant_id, created_at=self._now())
        return key_id_of(api_key)

    async def _add_key(self, key_id: str, digest: str, tenant_id: str) -> None:
        """Raises ConfigError for a tenant that another operator has removed meanwhile."""
        record = TenantRecord(tenant_id=tenant_id, created_at=self._now())
        await _add_key(self._store, key_id, digest, record, is_new=False)

    async def check_client(self, tenant_id: str, client_id: str) -> None:
        """Raises ConfigError if `add_client` would."""
        await self.one(tenant_id)
        digest = (await self._digests(tenant_id)).get(client_id)
        if digest is not None and not is_client(digest):
            raise ConfigError(f"{client_id!r} is the id of an API key: choose another name")
        known = await self._key(client_id, client_digest(client_id))
        if known is not None and known.tenant_id != tenant_id:
            raise ConfigError(f"the client {client_id!r} belongs to another tenant")
        if known is not None and not self._is_valid(known):
            raise ConfigError(f"the client {client_id!r} was revoked: choose another name")

    async def add_client(self, tenant_id: str, client_id: str) -> None:
        """Makes the NATS credential `client_id` one of this tenant. `revoke` with the client's id
        ends that.
        """
        await self.check_client(tenant_id, client_id)
        await self._add_key(client_id, client_digest(client_id), tenant_id)

    async def rotate(
        self, tenant_id: str, api_key: str, *, keep_s: float, key_id: str | None
    ) -> list[str]:
        """Adds `api_key`. The other keys, or only `key_id`, stay valid for `keep_s` seconds. NATS
        clients stay valid: no key replaces them.

        Returns the ids of the replaced keys.
        """
        await self.one(tenant_id)
        valid = await self._valid(tenant_id, key_id)
        replaced = [(key, digest) for key, digest in valid if not is_client(digest)]
        if key_id is not None and len(replaced) < len(valid):
            raise ConfigError(f"{key_id!r} is a NATS client, which no API key can replace")
        await self._add_key(key_id_of(api_key), digest_of(api_key), tenant_id)
        ends_at = self._now() + keep_s
        ended = [
            (key, digest)
            for key, digest in replaced
            if key.expires_at is None or key.expires_at > ends_at
        ]
        await self._end(ended, "expires_at", ends_at)
        return [key.key_id for key, _ in replaced]

    async def revoke(self, tenant_id: str, key_id: str | None) -> list[str]:
        """Revokes the key `key_id`, or all if None. Returns their ids."""
        await self.one(tenant_id)
        revoked = await self._valid(tenant_id, key_id)
        await self._end(revoked, "revoked_at", self._now())
        return [key.key_id for key, _ in revoked]

    async def _end(
        self,
        keys: Sequence[tuple[ApiKeyRecord, str]],
        field: retractions.KeyEnd,
        at: float,
    ) -> None:
        ttl_s = int(max(0.0, at - self._now())) + FORGET_S
        entries = [retractions.of_key(*each, self._now(), field=field, ends_at=at) for each in keys]
        unlisted = await retractions.list_entries(self._store, self._file, entries)
        for name in (api_key_record(digest) for _, digest in keys):
            await self._store.write([("HSET", name, field, at), ("EXPIRE", name, ttl_s)])
        if unlisted is not None:
            raise unlisted

    async def _valid(self, tenant_id: str, key_id: str | None) -> list[tuple[ApiKeyRecord, str]]:
        digests = await self._digests(tenant_id)
        if key_id is not None and key_id not in digests:
            raise ConfigError(
                f"the tenant {tenant_id!r} has no key {key_id!r}: `hearth tenant show` has the ids"
            )
        requested = digests if key_id is None else {key_id: digests[key_id]}
        valid = []
        for each, digest in requested.items():
            key = await self._key(each, digest)
            if key is not None and self._is_valid(key):
                valid.append((key, digest))
        return valid

    def _is_valid(self, key: ApiKeyRecord) -> bool:
        is_expired = key.expires_at is not None and key.expires_at <= self._now()
        return key.revoked_at is None and not is_expired

    async def _digests(self, tenant_id: str) -> dict[str, str]:
        found = await self._store.hash_get(keys_of(check_tenant_id(tenant_id)))
        return {key_id.decode(): digest.decode() for key_id, digest in found.items()}

    async def _key(self, key_id: str, digest: str) -> ApiKeyRecord | None:
        """Returns None for a key that ended more than FORGET_S ago: Redis has removed
        its record.
        """
        fields = await self._store.hash_get(api_key_record(digest))
        try:
            texts = {name.decode(): value.decode() for name, value in fields.items()}
            return msgspec.convert(texts, ApiKeyRecord, strict=False) if texts else None
        except UNREADABLE as error:
            raise ConfigError(f"the record of the key {key_id!r} is unreadable") from error

    # ── usage ────────────────────────────────────────────────────────────────────────────────────

    async def usage(self, tenant_ids: Sequence[str], days: Sequence[str]) -> list[UsageRow]:
        """Returns a row for each tenant, day, model and site with any use."""
        sites: dict[str, list[str]] = {}
        for name in sorted(await self._store.hash_get(TENANT_SITES)):
            tenant_id, _, site = name.decode().rpartition(SITE_SEPARATOR)
            sites.setdefault(tenant_id, []).append(site)
        rows = []
        for tenant_id in tenant_ids:
            for day in days:
                counts = await self._store.hash_get(usage_of(tenant_id, day))
                rows += _usage_rows(tenant_id, day, counts)
                for site in sites.get(tenant_id, ()):
                    counts = await self._store.hash_get(usage_at(tenant_id, day, site))
                    rows += _usage_rows(tenant_id, day, counts, site)
        return rows

    # ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _read(self, tenant_id: str) -> tuple[TenantRecord, bytes]:
        check_tenant_id(tenant_id)
        data = (await self._store.hash_get(TENANTS)).get(tenant_id.encode())
        if data is None:
            raise _unknown(tenant_id)
        record = decoded_tenant(data)
        if record is None:
            raise ConfigError(f"the record of the tenant {tenant_id!r} is unreadable")
        return record, data

    async def _swap(self, tenant_id: str, before: bytes, after: bytes) -> bool:
        return bool(await self._store.evaluate(SWAP, [TENANTS], [tenant_id, before, after]))


def _unknown(tenant_id: str) -> ConfigError:
    return ConfigError(f"tenant {tenant_id!r} does not exist: see `hearth tenant list`")


def _switches_on(changes: Mapping[str, Any]) -> bool:
    """Whether zero retention is given, maybe once more after a failure."""
    return changes.get("is_zero_retention") is True


def _covers(after: Sequence[str] | None, before: Sequence[str] | None) -> bool:
    """Whether all regions allowed before still are; None: all."""
    return after is None or (before is not None and set(before) <= set(after))


def _changed(record: TenantRecord, changes: Mapping[str, Any]) -> TenantRecord:
    """Returns the record with `changes` applied. Raises ConfigError for an invalid value."""
    fields = {**msgspec.structs.asdict(record), **changes}
    try:
        return msgspec.convert(fields, TenantRecord)
    except msgspec.ValidationError as error:
        raise ConfigError(f"invalid tenant limits: {error}") from error


def _usage_rows(
    tenant_id: str, day: str, counts: Mapping[bytes, bytes], site: str = ""
) -> list[UsageRow]:
    by_model: dict[str, dict[str, int]] = {}
    for field, amount in counts.items():
        kind, _, model = field.decode(errors="replace").partition(":")
        if kind in USAGE_KINDS and amount.isdigit():
            by_model.setdefault(model, {})[kind] = int(amount)
    return [
        UsageRow(tenant_id=tenant_id, day=day, model=model, site=site, **amounts)
        for model, amounts in sorted(by_model.items())
    ]
