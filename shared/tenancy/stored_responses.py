"""The keys of stored responses in Redis: gateways write them, and a tenant's switch deletes them.

    hearth:{tenant}:response:{id}       hash: `data`, a record; `previous`, the id before it
    hearth:{tenant}:responses:uses      sorted set: id → time of the last use
    hearth:{tenant}:responses:ends      sorted set: id → time of its end
    hearth:{tenant}:responses:sizes     hash: id → bytes; `total`: of all

Times are unix seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.store import Store
from shared.tenancy.pinned_prefix import key_part

MAX_AT_ONCE = 256  # records in one step of Redis

# KEYS: as of `response_keys`. Returns how many records were removed; 0: none is left.
DELETE_SOME_LUA = f"""
local ids = redis.call('ZRANGE', KEYS[2], 0, {MAX_AT_ONCE - 1})
for _, id in ipairs(ids) do
  redis.call('DEL', KEYS[1] .. id)
  redis.call('ZREM', KEYS[2], id)
end
if #ids == 0 then redis.call('DEL', KEYS[2], KEYS[3], KEYS[4]) end
return #ids
"""


def response_keys(tenant_id: str) -> Sequence[str]:
    """The start of the records' keys, uses, ends, sizes."""
    start = f"hearth:{key_part(tenant_id)}:response"
    return (f"{start}:", *(f"{start}s:{name}" for name in ("uses", "ends", "sizes")))


async def delete_all(store: Store, tenant_id: str) -> None:
    """Raises StoreUnavailable."""
    while await store.evaluate(DELETE_SOME_LUA, response_keys(tenant_id), []):
        pass
