"""What Redis holds of one tenant, by kind: how much there is, and its deletion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

from shared.store import Command, Store
from shared.subjects import at_site
from shared.tenancy import stored_responses
from shared.tenancy.model_alias import aliases_of
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import key_part
from shared.tenancy.site_usage import (
    TENANT_SITES,
    USAGE_UNSENT,
    deletion_commands,
    owner_of_usage,
    usage_at,
)
from shared.tenancy.tenant import api_key_record, keys_of, meter_of, open_requests_of, usage_of
from shared.tenancy.tenant_copy import TENANT_VERSIONS

USAGE_DAYS = 400  # those that usage is retained for
RECORDS_AT_ONCE = 100
KEYS_AT_ONCE = 1000  # of one command: a script takes some thousand arguments

# KEYS: keys. ARGV: for each the command that counts its content. Returns the counts.
COUNT_LUA = """
local counts = {}
for i, key in ipairs(KEYS) do counts[i] = redis.call(ARGV[i], key) end
return counts
"""

# KEYS: the hashes of a tenant's records of prefixes, the start of their keys. ARGV: the most to
# delete. Returns how many were deleted.
DELETE_RECORDS_LUA = """
local names = redis.call('ZRANGE', KEYS[1], 0, tonumber(ARGV[1]) - 1)
for _, name in ipairs(names) do redis.call('DEL', KEYS[2] .. name) end
if #names > 0 then redis.call('ZREM', KEYS[1], unpack(names)) end
return #names
"""


def prefix_records_of(tenant_id: str) -> str:
    """Returns the key of the hashes of a tenant's records of prefixes, by last use."""
    return f"hearth:{key_part(tenant_id)}:prefixes"


async def delete_prefix_records(store: Store, tenant_id: str) -> None:
    """Deletes the records of a tenant's prefixes. Raises StoreUnavailable."""
    keys = [prefix_records_of(tenant_id), pinned_prefix.record_key(tenant_id, b"")]
    while await store.evaluate(DELETE_RECORDS_LUA, keys, [RECORDS_AT_ONCE]):
        pass


async def counts(
    store: Store, tenant_id: str, now: float, sites: Sequence[str] = ()
) -> dict[str, int]:
    """Returns how many records of each kind there are; `sites` are those with usage of the tenant,
    `now` is in Unix seconds. Raises StoreUnavailable.
    """
    counted = {
        "API keys": (keys_of(tenant_id), "HLEN"),
        "aliases": (aliases_of(tenant_id), "HLEN"),
        "stored responses": (stored_responses.response_keys(tenant_id)[1], "ZCARD"),
        "named prefixes": (pinned_prefix.entries_key(tenant_id), "HLEN"),
        "records of cached prefixes": (prefix_records_of(tenant_id), "ZCARD"),
        "open requests": (open_requests_of(tenant_id), "ZCARD"),
        "used limits": (meter_of(tenant_id), "EXISTS"),
    }
    usage = list(usage_keys(tenant_id, now, sites))
    keys = [*(key for key, _ in counted.values()), *usage]
    commands = [*(command for _, command in counted.values()), *("EXISTS" for _ in usage)]
    found = [int(each) for each in await store.evaluate(COUNT_LUA, keys, commands)]
    by_kind = dict(zip(counted, found, strict=False))
    return by_kind | {"days of usage": sum(found[len(counted) :])}


def usage_keys(tenant_id: str, now: float, sites: Sequence[str] = ()) -> Iterator[str]:
    """Yields the keys of a tenant's usage, here and at other sites."""
    today = datetime.fromtimestamp(now, UTC).date()
    for back in range(-1, USAGE_DAYS + 1):  # a gateway's clock may be ahead
        day = (today - timedelta(days=back)).isoformat()
        yield usage_of(tenant_id, day)
        yield from (usage_at(tenant_id, day, site) for site in sites)


async def delete(store: Store, tenant_id: str) -> None:
    """Deletes all that Redis holds of a tenant, but its own record and its usage. Idempotent.
    Raises StoreUnavailable.
    """
    digests = (await store.hash_get(keys_of(tenant_id))).values()
    keys = [api_key_record(each.decode(errors="replace")) for each in digests]
    keys += [keys_of(tenant_id), aliases_of(tenant_id)]
    keys += [meter_of(tenant_id), open_requests_of(tenant_id)]
    await store.write([*_deletions(keys), ("HDEL", TENANT_VERSIONS, tenant_id)])
    await stored_responses.delete_all(store, tenant_id)
    await pinned_prefix.delete_all(store, tenant_id)
    await delete_prefix_records(store, tenant_id)


async def delete_usage(
    store: Store,
    tenant_id: str,
    created_at: Iterable[float],
    now: float,
    sites: Sequence[str] = (),
) -> None:
    """Deletes the usage of tenants of this name, here and as `sites` have reported it: in one step,
    after which no gateway writes any of those that were created then. Raises StoreUnavailable.
    """
    owners = (owner_of_usage(tenant_id, each) for each in created_at)
    commands = [
        *deletion_commands(owners, now),
        *_deletions(list(usage_keys(tenant_id, now, sites))),
        ("HDEL", USAGE_UNSENT, *usage_keys(tenant_id, now)),
        *(("HDEL", TENANT_SITES, at_site(tenant_id, each)) for each in sites),
    ]
    await store.write(commands)


def _deletions(keys: Sequence[str]) -> Iterator[Command]:
    starts = range(0, len(keys), KEYS_AT_ONCE)
    return (("DEL", *keys[start : start + KEYS_AT_ONCE]) for start in starts)
