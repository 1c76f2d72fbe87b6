"""The tenants of this site that other sites may serve, as Redis has them now.

A version only grows: it moves on when the record or the set of valid keys differs from what the
version stood for, whoever changed it. Versions are read before what they stand for, and swapped: a
gateway that was late gives no new version to an old record, and none to a removed tenant. A version
is at least the time in seconds, so that it grows although Redis lost it, or the tenant was removed
and is added again; no other site reads a time in it.

Other sites report the usage of these tenants. One that was cut off may have usage of a tenant that
was removed meanwhile with its usage: it reports none of a later tenant of that name before it has
confirmed the removal, when it has deleted what it had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from hashlib import blake2b
from typing import Any

import msgspec

from shared.errors import InvalidRequest, Overloaded
from shared.store import Store, StoreUnavailable, reading_reply
from shared.subjects import at_site
from shared.tenancy.deletion.kv_drops import LAST, SITE_POSITIONS
from shared.tenancy.site_usage import TENANT_SITES, usage_at
from shared.tenancy.tenant import (
    GENERATION,
    TENANTS,
    USAGE_KINDS,
    ApiKeyRecord,
    TenantRecord,
    api_key_record,
    decoded_tenant,
    is_client,
    keys_of,
)
from shared.tenancy.tenant_copy import MAX_KEYS, TENANT_VERSIONS
from shared.transport.wire_errors import UNREADABLE

MAX_READS = 5
MAX_RECORDED = 4096  # totals of a tenant's day at one site: of a thousand models
MAX_DAYS_LATE = 31
_RETENTION_S = 400 * 86_400

# KEYS: hashes. Returns the time, and fields and values of each hash.
READ_EACH_LUA = """
local found = {}
for i, key in ipairs(KEYS) do found[i] = redis.call('HGETALL', key) end
return {redis.call('TIME')[1], found}
"""

# KEYS: a hash, all tenants. ARGV: triples of a tenant, its expected value (empty: none), its new
# value. Returns the tenants that had other values, or have been removed.
SWAP_EACH_LUA = """
local failed = {}
for i = 1, #ARGV, 3 do
  local is_there = redis.call('HEXISTS', KEYS[2], ARGV[i]) == 1
  if is_there and (redis.call('HGET', KEYS[1], ARGV[i]) or '') == ARGV[i + 1] then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2])
  else
    failed[#failed + 1] = ARGV[i]
  end
end
return failed
"""

# KEYS: the sites that tenants have named, the last order. ARGV: tenants and sites.
NAME_SITES_LUA = """
local last = redis.call('GET', KEYS[2]) or ''
for _, name in ipairs(ARGV) do redis.call('HSET', KEYS[1], name, last) end
return 0
"""

# KEYS: usage at a site, the sites that tenants have named, what sites have confirmed, the last
# order. ARGV: the tenant and the site, the site, seconds of retention, the most totals, then pairs
# of a field and its total. Returns 0 if the tenant has never named the site, -1 if the
# site has not confirmed the orders before; those of a lost Redis do not count. A total never falls.
RECORD_TOTALS_LUA = """
local named = redis.call('HGET', KEYS[2], ARGV[1])
if not named then return 0 end
local before = tonumber(named) or 0
local confirmed = tonumber(redis.call('HGET', KEYS[3], ARGV[2]) or '0')
local last = tonumber(redis.call('GET', KEYS[4]) or '0')
if confirmed < before and before <= last then return -1 end
for i = 5, #ARGV, 2 do
  local before = tonumber(redis.call('HGET', KEYS[1], ARGV[i]))
  if before or redis.call('HLEN', KEYS[1]) < tonumber(ARGV[4]) then
    if (before or -1) < tonumber(ARGV[i + 1]) then
      redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
    end
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
"""

Fields = Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class HomeTenant:
    """A tenant with other sites, and the digests of its valid API keys."""

    record: TenantRecord
    key_digests: tuple[str, ...]
    version: int = 0

    @property
    def content(self) -> bytes:
        """Identifies what a version stands for."""
        data = msgspec.json.encode((self.record, self.key_digests))
        return blake2b(data, digest_size=16).hexdigest().encode()


async def read_home_tenants(store: Store) -> list[HomeTenant]:
    """Returns the tenants that other sites may serve, sorted by name. Raises StoreUnavailable, also
    for a Redis without records.
    """
    for _ in range(MAX_READS):
        found = await _read_once(store)
        if found is not None:
            return found
    raise StoreUnavailable("the tenants of this site change all the time")


async def _read_once(store: Store) -> list[HomeTenant] | None:
    """Returns None if another gateway has changed a version meanwhile."""
    versions, tenants = (await _read(store, [TENANT_VERSIONS, TENANTS]))[1]
    if not tenants and await store.get(GENERATION) is None:
        raise StoreUnavailable(f"Redis is empty: it has no {GENERATION}")
    records = _with_sites(tenants)
    if not records:
        return []
    keys = (await _read(store, [keys_of(each.tenant_id) for each in records]))[1]
    digests = [[each.decode() for each in fields.values() if _is_key(each)] for fields in keys]
    now, found = await _read(store, [api_key_record(each) for row in digests for each in row])
    key_records, home = iter(found), []
    for record, row in zip(records, digests, strict=True):
        of_tenant = {each: _key(next(key_records)) for each in row}
        home.append(HomeTenant(record, _valid_digests(of_tenant, record.tenant_id, now)))
    return await _with_versions(store, home, versions, int(now))


async def _read(store: Store, keys: Sequence[str]) -> tuple[float, list[dict[bytes, bytes]]]:
    """Returns Redis's time, in seconds, and the fields of hashes."""
    reply = await store.evaluate(READ_EACH_LUA, keys, [])
    with reading_reply():
        now, found = reply
        return float(now), [dict(zip(row[::2], row[1::2], strict=True)) for row in found]


def _with_sites(tenants: Fields) -> list[TenantRecord]:
    found = (decoded_tenant(data) for _, data in sorted(tenants.items()) if b'"sites"' in data)
    return [each for each in found if each is not None and each.sites]


def _is_key(digest: bytes) -> bool:
    return not is_client(digest.decode(errors="replace"))


def _key(fields: Fields) -> ApiKeyRecord | None:
    texts: Any = {name.decode(): value.decode() for name, value in fields.items()}
    try:
        return msgspec.convert(texts, ApiKeyRecord, strict=False)
    except UNREADABLE:
        return None


def _valid_digests(
    keys: Mapping[str, ApiKeyRecord | None], tenant_id: str, now: float
) -> tuple[str, ...]:
    valid = [
        (key.created_at, digest)
        for digest, key in keys.items()
        if key is not None
        and key.tenant_id == tenant_id
        and key.revoked_at is None
        and (key.expires_at is None or key.expires_at > now)
    ]
    return tuple(sorted(digest for _, digest in sorted(valid)[-MAX_KEYS:]))


async def _with_versions(
    store: Store, home: Sequence[HomeTenant], versions: Fields, now: int
) -> list[HomeTenant] | None:
    numbered, swaps = [], []
    for each in home:
        name, content = each.record.tenant_id.encode(), each.content
        before = versions.get(name, b"")
        number, _, known = before.partition(b":")
        version = int(number) if number.isdigit() else 0
        if known != content:
            version = max(version + 1, now)
            swaps += [name, before, b"%d:%b" % (version, content)]
        numbered.append(HomeTenant(each.record, each.key_digests, version))
    if not swaps:
        return numbered
    keys = [TENANT_VERSIONS, TENANTS]
    return None if await store.evaluate(SWAP_EACH_LUA, keys, swaps) else numbered


# ── usage at other sites ────────────────────────────────────────────────────────────────────────


async def name_sites(store: Store, tenant_id: str, sites: Sequence[str]) -> None:
    """Lets sites report usage of a tenant from now on. Raises StoreUnavailable."""
    if sites:
        names = [at_site(tenant_id, each) for each in sites]
        await store.evaluate(NAME_SITES_LUA, [TENANT_SITES, LAST], names)


async def record_totals(
    store: Store, tenant_id: str, site: str, day: str, totals: Sequence[tuple[str, int]], now: float
) -> None:
    """Records what a site reports; `now` is in Unix seconds. Raises InvalidRequest,
    StoreUnavailable, and Overloaded for what it may report later.
    """
    if not _is_recent(day, now):
        today = datetime.fromtimestamp(now, UTC).date()
        raise InvalidRequest(
            f"usage of {day!r} is not of the last {MAX_DAYS_LATE} days, it is {today} here: it was "
            "reported too late, or the clocks of the two sites are apart"
        )
    for field, _ in totals:
        if field.partition(":")[0] not in USAGE_KINDS or not field.isprintable():
            raise InvalidRequest(f"usage has no count {field[:64]!r}")
    keys = [usage_at(tenant_id, day, site), TENANT_SITES, SITE_POSITIONS, LAST]
    pairs = [part for each in totals for part in each]
    arguments = [at_site(tenant_id, site), site, _RETENTION_S, MAX_RECORDED, *pairs]
    is_recorded = int(await store.evaluate(RECORD_TOTALS_LUA, keys, arguments))
    if not is_recorded:
        raise InvalidRequest(f"no tenant {tenant_id!r} has named this site")
    if is_recorded < 0:
        reason = f"site {site!r} has not deleted yet what it has of an earlier {tenant_id!r}"
        raise Overloaded(reason, retry_after_s=1.0)


def _is_recent(day: str, now: float) -> bool:
    """Whether a day is near today. Clocks of two sites may differ by hours."""
    try:
        found = date.fromisoformat(day)
    except ValueError:
        return False
    if found.isoformat() != day:  # another form of it would be another record
        return False
    today = datetime.fromtimestamp(now, UTC).date()
    return timedelta(days=-2) <= today - found <= timedelta(days=MAX_DAYS_LATE)
