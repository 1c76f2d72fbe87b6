"""The keys of stored responses in Redis: gateways write them, and a tenant's switch deletes them.

    hearth:{tenant}:response:{id}       hash: `data`, a record; `previous`, the id before it
    hearth:{tenant}:responses:uses      sorted set: id → time of the last use
    hearth:{tenant}:responses:ends      sorted set: id → time of its end
    hearth:{tenant}:responses:sizes     hash: id → bytes; `total`: of all
    hearth:responses:held               sorted set: start of a tenant's keys → its bytes in Redis
    hearth:responses:ends               sorted set: the same → the first end of its records
    hearth:responses:total              bytes in Redis of all tenants

Times are unix seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.store import Store
from shared.tenancy.prefixes.pinned_prefix import key_part

MAX_AT_ONCE = 256  # records in one step of Redis
RECORD_BYTES = 1024  # memory of Redis for a record besides its data
ALL_KEYS = tuple(f"hearth:responses:{name}" for name in ("held", "ends", "total"))

# Scripts with the KEYS of `response_keys` begin with these functions. `start` is that of the keys
# of one tenant's records. `add_up` follows every change of the tenant's records.
CHANGES_LUA = f"""
local function key_of(start, name) return start:sub(1, -2) .. 's:' .. name end

local function remove(start, id)
  redis.call('DEL', start .. id)
  redis.call('ZREM', key_of(start, 'uses'), id)
  redis.call('ZREM', key_of(start, 'ends'), id)
  local sizes = key_of(start, 'sizes')
  local size = redis.call('HGET', sizes, id)
  if size then
    redis.call('HDEL', sizes, id)
    redis.call('HINCRBY', sizes, 'total', -tonumber(size))
  end
end

local function add_up(start)
  local sizes, held = key_of(start, 'sizes'), 0
  local before = tonumber(redis.call('ZSCORE', KEYS[5], start) or '0')
  local first = redis.call('ZRANGE', key_of(start, 'ends'), 0, 0, 'WITHSCORES')
  if #first > 0 then
    local num_records = redis.call('HLEN', sizes) - 1
    held = tonumber(redis.call('HGET', sizes, 'total')) + num_records * {RECORD_BYTES}
    redis.call('ZADD', KEYS[5], held, start)
    redis.call('ZADD', KEYS[6], first[2], start)
  else
    redis.call('DEL', sizes)
    redis.call('ZREM', KEYS[5], start)
    redis.call('ZREM', KEYS[6], start)
  end
  redis.call('INCRBY', KEYS[7], held - before)
end
"""

# KEYS: as of `response_keys`. Returns how many records were removed; 0: none is left.
DELETE_SOME_LUA = (
    CHANGES_LUA
    + f"""
local ids = redis.call('ZRANGE', KEYS[2], 0, {MAX_AT_ONCE - 1})
for _, id in ipairs(ids) do remove(KEYS[1], id) end
if #ids == 0 then redis.call('DEL', KEYS[2], KEYS[3], KEYS[4]) end
add_up(KEYS[1])
return #ids
"""
)


def response_keys(tenant_id: str) -> Sequence[str]:
    """Returns the start of the records' keys, uses, ends, sizes, and the keys of all
    tenants together.
    """
    start = f"hearth:{key_part(tenant_id)}:response"
    return (f"{start}:", *(f"{start}s:{name}" for name in ("uses", "ends", "sizes")), *ALL_KEYS)


async def delete_all(store: Store, tenant_id: str) -> None:
    """Deletes all stored responses of a tenant. Raises StoreUnavailable."""
    while await store.evaluate(DELETE_SOME_LUA, response_keys(tenant_id), []):
        pass
