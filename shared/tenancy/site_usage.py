"""The usage of a tenant at other sites, as its home site keeps it, and the deletion of usage.

    hearth:usage_unsent                 hash, elsewhere: a record of usage → its number of changes
    hearth:{tenant}:usage:{day}:{site}  hash, at home: {kind}:{model} → total at that site
    hearth:tenant_sites                 hash, at home: {tenant}/{site}, which the tenant has ever
                                        named → the last order to drop data at that time
    hearth:usage_batch:deleted          sorted set: {tenant} {its creation} → time of the deletion

A site reports totals, not differences: a report that is repeated counts once, and what could not be
sent while a link was cut is in the next one.

A gateway that was frozen may have usage of a tenant whose usage is deleted meanwhile. It is not
written: the deletion is remembered as long as a gateway's batches of usage are.

A site that was cut off may have usage of a tenant that was removed meanwhile with its usage. It
reports none of a later tenant of that name before it has confirmed the removal: then it has deleted
what it had.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta

from shared.errors import InvalidRequest, Overloaded
from shared.store import Command, Store
from shared.subjects import at_site
from shared.tenancy.deletion.kv_drops import LAST, SITE_POSITIONS
from shared.tenancy.tenant import USAGE_KINDS, usage_of

USAGE_UNSENT = "hearth:usage_unsent"
TENANT_SITES = "hearth:tenant_sites"
USAGE_DELETED = "hearth:usage_batch:deleted"  # as long as the batches
MAX_TOTALS = 256  # in one report
MAX_RECORDED = 4096  # totals of a tenant's day at one site: of a thousand models
MAX_DAYS_LATE = 31
DELETED_S = 30 * 86_400
_RETENTION_S = 400 * 86_400

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

# KEYS: a hash. ARGV: a field and a value. Removes the field if it has this value.
UNMARK_LUA = """
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then redis.call('HDEL', KEYS[1], ARGV[1]) end
return 0
"""


# KEYS: the owners of deleted usage. ARGV: owners. Returns 1 if all are among them.
ARE_DELETED_LUA = """
for _, owner in ipairs(ARGV) do
  if not redis.call('ZSCORE', KEYS[1], owner) then return 0 end
end
return 1
"""


def usage_at(tenant_id: str, day: str, site: str) -> str:
    return f"{usage_of(tenant_id, day)}:{site}"


def tenant_and_day(usage_key: str) -> tuple[str, str] | None:
    """Splits a key of `usage_of`. Returns None for another one."""
    parts = usage_key.split(":")
    return (parts[1], parts[3]) if len(parts) == 4 and parts[2] == "usage" else None


def reports_of(fields: Mapping[bytes, bytes]) -> list[tuple[tuple[str, int], ...]]:
    """Returns the totals of a record of usage by `{kind}:{model}`, in parts for one report each."""
    found = ((name.decode(errors="replace"), total) for name, total in sorted(fields.items()))
    totals = tuple((name, int(total)) for name, total in found if total.isdigit())
    return [totals[first : first + MAX_TOTALS] for first in range(0, len(totals), MAX_TOTALS)]


def owner_of_usage(tenant_id: str, created_at: float) -> str:
    """Returns what tells a tenant from a later one of its name, in USAGE_DELETED."""
    return f"{tenant_id} {created_at!r}"


def deletion_commands(owners: Iterable[str], now: float) -> list[Command]:
    """Returns the commands that remember a deletion of usage; `now` is in Unix seconds."""
    return [
        *(("ZADD", USAGE_DELETED, now, each) for each in owners),
        ("ZREMRANGEBYSCORE", USAGE_DELETED, "-inf", now - DELETED_S),
        ("EXPIRE", USAGE_DELETED, DELETED_S),
    ]


async def is_usage_deleted(store: Store, tenant_id: str, created_at: Sequence[float]) -> bool:
    """Whether the usage of all tenants of this name that were created then is deleted. Raises
    StoreUnavailable.
    """
    owners = [owner_of_usage(tenant_id, each) for each in created_at]
    return bool(await store.evaluate(ARE_DELETED_LUA, [USAGE_DELETED], owners))


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
