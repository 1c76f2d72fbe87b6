"""Reads what a backup consists of from a Redis in use.

A tenant with its keys and aliases is read in one step, and so is each stored response, prefix and
day of usage. What changes while the backup runs is in it as it was before or after. Texts of a
tenant that allows them no more at the end are not in it: it is read again without them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from typing import Any

import msgspec

from shared.backup.records import (
    Stored,
    StoredDrop,
    StoredHash,
    StoredKey,
    StoredLines,
    StoredPrefix,
    StoredResponse,
    StoredRetractions,
    StoredTenant,
    StoredUsage,
    StoredValue,
)
from shared.block_hash import PUBLIC_TENANT_ID
from shared.errors import ConfigError
from shared.model_registry.record import REGISTRY
from shared.store import Store, reading_reply
from shared.tenancy import audit
from shared.tenancy.declared_classes import REGION_CLASSES
from shared.tenancy.deletion import kv_drops, retractions, site_drops
from shared.tenancy.deletion.tenant_data import usage_keys
from shared.tenancy.model_alias import ALIASES, aliases_of
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.site_usage import TENANT_SITES, USAGE_UNSENT, tenant_and_day
from shared.tenancy.stored_responses import response_keys
from shared.tenancy.tenant import (
    TENANTS,
    ApiKeyRecord,
    TenantRecord,
    api_key_record,
    decoded_tenant,
    keys_of,
)
from shared.tenancy.tenant_copy import SITE_KEYS, SITES
from shared.transport.wire_errors import UNREADABLE, one_line

HASHES = (SITES, SITE_KEYS, TENANT_SITES, USAGE_UNSENT, REGISTRY, ALIASES)
RESPONSES_AT_ONCE = 16  # up to 4 MiB each
USAGE_AT_ONCE = 512

# KEYS: all tenants, a tenant's keys, its aliases, the start of the records of keys. ARGV: the
# tenant. Returns its record (false: none), its aliases, and of each key the id, the digest, the
# record and its seconds to live.
TENANT_LUA = """
local found = {}
local keys = redis.call('HGETALL', KEYS[2])
for i = 1, #keys, 2 do
  local name = KEYS[4] .. keys[i + 1]
  found[#found + 1] = {
    keys[i], keys[i + 1], redis.call('HGETALL', name), redis.call('TTL', name)
  }
end
return {redis.call('HGET', KEYS[1], ARGV[1]), redis.call('HGETALL', KEYS[3]), found}
"""

# KEYS: hashes. Returns of each that is there its place, its fields and its seconds to live.
USAGE_LUA = """
local found = {}
for i, key in ipairs(KEYS) do
  local fields = redis.call('HGETALL', key)
  if #fields > 0 then found[#found + 1] = {i, fields, redis.call('TTL', key)} end
end
return found
"""

# KEYS: as of `response_keys`. ARGV: ids. Returns of each that is there the id, data, the id before
# it, the time of its last use and of its end.
RESPONSES_LUA = """
local found = {}
for _, id in ipairs(ARGV) do
  local record = redis.call('HMGET', KEYS[1] .. id, 'data', 'previous')
  local used, ends = redis.call('ZSCORE', KEYS[2], id), redis.call('ZSCORE', KEYS[3], id)
  if record[1] and used and ends then
    found[#found + 1] = {id, record[1], record[2] or '', used, ends}
  end
end
return found
"""

RESPONSE_IDS_LUA = "return redis.call('ZRANGE', KEYS[1], 0, -1)"
LINES_LUA = "return redis.call('XREVRANGE', KEYS[1], '+', '-')"

Records = Mapping[str, TenantRecord | None]


async def collect(
    store: Store, now: float, *, with_texts: bool, withdrawn: Collection[str]
) -> AsyncIterator[Stored]:
    """Yields the records of a backup, those of tenants first, and no texts of the `withdrawn`;
    `now` is in Unix seconds. Raises ConfigError, StoreUnavailable.
    """
    # read first: what is taken back from here on is in a later list
    yield StoredRetractions(entries=await retractions.read_listed(store))
    tenants = await read_tenants(store)
    for tenant_id in tenants:
        found = await _tenant(store, tenant_id)
        if found is not None:
            yield found
    classes = await store.get(REGION_CLASSES)
    if classes is not None:
        yield StoredValue(key=REGION_CLASSES, value=classes)
    for key in HASHES:
        fields = await store.hash_get(key)
        if fields:
            yield StoredHash(key=key, fields=sorted(fields.items()))
    async for usage in _usage(store, tenants, now):
        yield usage
    for stream in audit.STREAMS.values():
        lines = await store.evaluate(LINES_LUA, [stream], [])
        if lines:
            yield StoredLines(key=stream, lines=[(each, list(row)) for each, row in lines[::-1]])
    confirmed = min((await site_drops.positions(store)).values(), default=None)
    for order in await kv_drops.orders(store):
        if not order.is_finished or (confirmed is not None and order.drop.number > confirmed):
            yield StoredDrop(drop=order.drop)
    if with_texts:
        holders = {each for each, record in tenants.items() if _allows_texts(record)}
        for tenant_id in (PUBLIC_TENANT_ID, *sorted(holders - {*withdrawn})):
            async for text in _texts(store, tenant_id, now):
                yield text


async def read_tenants(store: Store) -> dict[str, TenantRecord | None]:
    """Returns the tenants of this site by name; None for an unreadable record."""
    found = await store.hash_get(TENANTS)
    return {name.decode(): decoded_tenant(data) for name, data in sorted(found.items())}


async def without_texts(store: Store, holders: Collection[str]) -> set[str]:
    """Returns which of the tenants allow no texts any more. Raises StoreUnavailable."""
    tenants = await read_tenants(store)
    return {each for each in holders if each and not _allows_texts(tenants.get(each))}


def _allows_texts(record: TenantRecord | None) -> bool:
    return record is not None and not record.is_zero_retention


async def _tenant(store: Store, tenant_id: str) -> StoredTenant | None:
    """Returns None for a tenant that has been removed meanwhile."""
    names = [TENANTS, keys_of(tenant_id), aliases_of(tenant_id), api_key_record("")]
    reply = await store.evaluate(TENANT_LUA, names, [tenant_id])
    with reading_reply():
        record, aliases, keys = reply
        if record is None:
            return None
        return StoredTenant(
            tenant_id=tenant_id,
            record=record,
            keys=tuple(_keys(keys)),
            aliases=_pairs(aliases),
        )


def _keys(found: list[Any]) -> Iterator[StoredKey]:
    """Yields keys. Raises ConfigError for an unreadable one, which a restore could not judge."""
    for key_id, digest, fields, ttl_s in found:
        if not fields:  # it ended, and Redis has forgotten its record
            continue
        texts = {name.decode(): value.decode() for name, value in _pairs(fields)}
        try:
            record = msgspec.convert(texts, ApiKeyRecord, strict=False)
        except UNREADABLE as error:
            raise ConfigError(
                f"the record of the key {key_id.decode()!r} is unreadable: {one_line(error)}"
            ) from None
        yield StoredKey(
            key_id=key_id.decode(), digest=digest.decode(), record=record, ttl_s=_ttl(ttl_s)
        )


async def _usage(store: Store, tenants: Records, now: float) -> AsyncIterator[StoredUsage]:
    """Yields usage of tenants, here and at other sites, and of other sites' tenants that is not
    sent yet.
    """
    sites: dict[str, list[str]] = {}
    for name in sorted(await store.hash_get(TENANT_SITES)):
        tenant_id, _, site = name.decode().rpartition("/")
        sites.setdefault(tenant_id, []).append(site)
    named = [
        (key, tenant_id)
        for tenant_id in tenants
        for key in usage_keys(tenant_id, now, sites.get(tenant_id, ()))
    ]
    unsent = (each.decode() for each in sorted(await store.hash_get(USAGE_UNSENT)))
    named += [(key, parts[0]) for key in unsent if (parts := tenant_and_day(key)) is not None]
    for start in range(0, len(named), USAGE_AT_ONCE):
        part = named[start : start + USAGE_AT_ONCE]
        reply = await store.evaluate(USAGE_LUA, [key for key, _ in part], [])
        for place, fields, ttl_s in reply:
            key, tenant_id = part[place - 1]
            counts = [(name, int(sum_)) for name, sum_ in _pairs(fields) if sum_.isdigit()]
            yield StoredUsage(key=key, tenant_id=tenant_id, counts=counts, ttl_s=_ttl(ttl_s))


async def _texts(
    store: Store, tenant_id: str, now: float
) -> AsyncIterator[StoredResponse | StoredPrefix]:
    keys = response_keys(tenant_id)
    ids = await store.evaluate(RESPONSE_IDS_LUA, [keys[2]], [])
    for start in range(0, len(ids), RESPONSES_AT_ONCE):
        part = ids[start : start + RESPONSES_AT_ONCE]
        for name, data, previous, used_at, ends_at in await store.evaluate(
            RESPONSES_LUA, keys, part
        ):
            if float(ends_at) > now:
                yield StoredResponse(
                    tenant_id=tenant_id,
                    response_id=name.decode(),
                    data=data,
                    previous=previous,
                    used_at=float(used_at),
                    ends_at=float(ends_at),
                )
    for name, entry in (await pinned_prefix.entries(store, tenant_id)).items():
        prefix = await pinned_prefix.load(store, tenant_id, name)
        if prefix is not None and not entry.is_over(now):
            data = msgspec.msgpack.encode(prefix)
            yield StoredPrefix(tenant_id=tenant_id, name=name, data=data)


def _pairs(found: list[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(found[::2], found[1::2], strict=True))


def _ttl(seconds: int) -> int | None:
    """Redis replies -1 for a key that stays."""
    return seconds if seconds >= 0 else None
