"""The scripts of stored responses, each an atomic step. Times are unix seconds.

`shared/tenancy/stored_responses.py` has the keys.
"""

from __future__ import annotations

from shared.tenancy.tenant import MAY_STORE_LUA

_REMOVE = """
local function remove(id)
  redis.call('DEL', KEYS[1] .. id)
  redis.call('ZREM', KEYS[2], id)
  redis.call('ZREM', KEYS[3], id)
  local size = redis.call('HGET', KEYS[4], id)
  if size then
    redis.call('HDEL', KEYS[4], id)
    redis.call('HINCRBY', KEYS[4], 'total', -tonumber(size))
  end
  return size
end
"""

# KEYS of all: the start of the records' keys, uses, ends, sizes.
# SAVE also: all tenants' records, which an operator may have changed since the response began.
# ARGV: id, data, previous id, seconds to live, now, bytes that a tenant may store, tenant, region.
# Returns how many of the responses used longest ago were removed to make room; -1: nothing is
# stored, as the tenant's record forbids it.
SAVE = (
    MAY_STORE_LUA
    + _REMOVE
    + """
if not may_store(KEYS[5], ARGV[7], ARGV[8]) then return -1 end
local id, data, life, now = ARGV[1], ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5])
for _, ended in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, 256)) do
  remove(ended)
end
remove(id)
local removed = 0
while tonumber(redis.call('HGET', KEYS[4], 'total') or '0') + #data > tonumber(ARGV[6]) do
  local oldest = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
  if not oldest then break end
  remove(oldest)
  removed = removed + 1
end
redis.call('HSET', KEYS[1] .. id, 'data', data, 'previous', ARGV[3])
redis.call('EXPIRE', KEYS[1] .. id, life)
redis.call('ZADD', KEYS[2], now, id)
redis.call('ZADD', KEYS[3], now + life, id)
redis.call('HSET', KEYS[4], id, #data)
redis.call('HINCRBY', KEYS[4], 'total', #data)
for place = 2, 4 do redis.call('EXPIRE', KEYS[place], life) end
return removed
"""
)

# ARGV: ids. Returns the bytes of each response, in their order; false for an unknown one.
SIZES = """
local found = {}
for place, id in ipairs(ARGV) do
  local is_known = redis.call('EXISTS', KEYS[1] .. id) == 1
  found[place] = is_known and tonumber(redis.call('HGET', KEYS[4], id) or '') or false
end
return found
"""

# ARGV: id, how many may be read. Returns the ids of the response and of those before it, newest
# first, each followed by its bytes; or which is wrong with them.
CHAIN = """
local found, id = {}, ARGV[1]
for _ = 1, tonumber(ARGV[2]) do
  local previous = redis.call('HGET', KEYS[1] .. id, 'previous')
  local size = previous and redis.call('HGET', KEYS[4], id)
  if not size then return 'unknown' end
  found[#found + 1] = id
  found[#found + 1] = tonumber(size)
  id = previous
  if id == '' then return found end
end
return 'too_long'
"""

# ARGV: now, ids. Returns the data of the responses, in their order; false for an unknown one.
READ = """
local found = {}
for place = 2, #ARGV do
  found[place - 1] = redis.call('HGET', KEYS[1] .. ARGV[place], 'data')
  redis.call('ZADD', KEYS[2], 'XX', ARGV[1], ARGV[place])
end
return found
"""

# ARGV: id. Returns 1 if there was such a response.
DELETE = (
    _REMOVE
    + """
local is_known = redis.call('EXISTS', KEYS[1] .. ARGV[1])
remove(ARGV[1])
return is_known
"""
)
