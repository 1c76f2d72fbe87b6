"""Lua scripts for stored responses, each one atomic step. Times are unix seconds.
`shared/tenancy/stored_responses.py` has the keys.
"""

from __future__ import annotations

from shared.tenancy.stored_responses import CHANGES_LUA, MAX_AT_ONCE, RECORD_BYTES
from shared.tenancy.tenant import MAY_STORE_LUA

# KEYS of all: as of `response_keys`.
# SAVE also: RECORD_KEYS, as an operator may have changed the record since the response began.
# ARGV: id, data, previous id, seconds to live, now, bytes that a tenant may store, tenant, region,
# bytes of Redis that all tenants may take, the region's classes, and the creation of the tenant.
# Room is made by removing the responses used longest ago: those of the tenant beyond its own bound,
# else those of the tenant that holds most, so that one which stores little keeps it beside any
# other. Returns how many were removed, after the outcome: stored; forbidden by the tenant's record;
# too_large; or more: call again, as more must go than one step of Redis removes.
SAVE = (
    MAY_STORE_LUA
    + CHANGES_LUA
    + f"""
if not may_store(KEYS[8], KEYS[9], ARGV[7], ARGV[11], ARGV[8], ARGV[10]) then
  return {{'forbidden', 0}}
end
local start, id, data, life, now = KEYS[1], ARGV[1], ARGV[2], ARGV[4], ARGV[5]
local max_own, max_all = tonumber(ARGV[6]), tonumber(ARGV[9]) - {RECORD_BYTES}
if #data > math.min(max_own, max_all) then return {{'too_large', 0}} end

local function remove_ended(start)
  local ends = key_of(start, 'ends')
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', now, 'LIMIT', 0, {MAX_AT_ONCE})) do
    remove(start, id)
  end
  add_up(start)
end

local function remove_oldest(start)
  local oldest = redis.call('ZRANGE', key_of(start, 'uses'), 0, 0)[1]
  if oldest then remove(start, oldest) else redis.call('DEL', key_of(start, 'ends')) end
  add_up(start)
  return oldest
end

local function excess_holder()
  local own = tonumber(redis.call('HGET', KEYS[4], 'total') or '0')
  if own + #data > max_own then return start end
  local all = tonumber(redis.call('GET', KEYS[7]) or '0')
  if all + #data > max_all then
    return redis.call('ZREVRANGE', KEYS[5], 0, 0)[1]
  end
end

for _, each in ipairs(redis.call('ZRANGEBYSCORE', KEYS[6], '-inf', now, 'LIMIT', 0, 4)) do
  remove_ended(each)
end
remove_ended(start)
remove(start, id)
add_up(start)
local removed, holder = 0, excess_holder()
while holder do
  if removed == {MAX_AT_ONCE} then return {{'more', removed}} end
  if remove_oldest(holder) then removed = removed + 1 end
  holder = excess_holder()
end
redis.call('HSET', start .. id, 'data', data, 'previous', ARGV[3])
redis.call('EXPIRE', start .. id, life)
redis.call('ZADD', KEYS[2], now, id)
redis.call('ZADD', KEYS[3], now + life, id)
redis.call('HSET', KEYS[4], id, #data)
redis.call('HINCRBY', KEYS[4], 'total', #data)
for place = 2, 4 do redis.call('EXPIRE', KEYS[place], life) end
add_up(start)
return {{'stored', removed}}
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
    CHANGES_LUA
    + """
local is_known = redis.call('EXISTS', KEYS[1] .. ARGV[1])
remove(KEYS[1], ARGV[1])
add_up(KEYS[1])
return is_known
"""
)
