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
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shared.store import Command, Store
from shared.tenancy.tenant import usage_of

USAGE_UNSENT = "hearth:usage_unsent"
TENANT_SITES = "hearth:tenant_sites"
USAGE_DELETED = "hearth:usage_batch:deleted"  # as long as the batches
MAX_TOTALS = 256  # in one report
DELETED_S = 30 * 86_400

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
