"""Lua scripts of a restore, each one atomic step that adds what Redis lacks and replaces nothing.

Each returns how many it has added. ARGV[1] is 1 to write, 0 to count what would be added.
"""

from __future__ import annotations

from shared.tenancy.stored_responses import CHANGES_LUA
from shared.tenancy.tenant import MAY_STORE_LUA

# KEYS: all tenants, the generation, the start of the records of keys. ARGV: write; the generation;
# tenants as msgpack: name, record, its record in Redis as it was read (empty: none), the keys of
# its list of keys and of its aliases, aliases as pairs, and of each key the id, the digest, seconds
# to live (0: it stays) and its record as pairs. A key's end is never undone, and the earlier one
# counts. Returns the numbers of tenants, keys and aliases, and the tenants that have changed.
TENANTS_LUA = """
local writes, num_tenants, num_keys, num_aliases, changed = ARGV[1] == '1', 0, 0, 0, {}

local function set_new(key, field, value)
  if redis.call('HEXISTS', key, field) == 1 then return 0 end
  if writes then redis.call('HSET', key, field, value) end
  return 1
end

local function add_key(list, id, digest, ttl_s, pairs)
  local name = KEYS[3] .. digest
  num_keys = num_keys + set_new(list, id, digest)
  local is_new = redis.call('EXISTS', name) == 0
  for i = 1, #pairs, 2 do
    local field, value = pairs[i], pairs[i + 1]
    local present = redis.call('HGET', name, field)
    local is_earlier = present and (field == 'expires_at' or field == 'revoked_at')
      and tonumber(value) < tonumber(present)
    if writes and (not present or is_earlier) then redis.call('HSET', name, field, value) end
  end
  if writes and is_new and ttl_s > 0 then redis.call('EXPIRE', name, ttl_s) end
end

for _, tenant in ipairs(cmsgpack.unpack(ARGV[3])) do
  local name, record, present, list, alias_key, aliases, keys = unpack(tenant)
  if (redis.call('HGET', KEYS[1], name) or '') ~= present then
    changed[#changed + 1] = name
  else
    if present == '' then
      num_tenants = num_tenants + 1
      if writes then redis.call('HSET', KEYS[1], name, record) end
    end
    for _, key in ipairs(keys) do add_key(list, unpack(key)) end
    for i = 1, #aliases, 2 do
      num_aliases = num_aliases + set_new(alias_key, aliases[i], aliases[i + 1])
    end
  end
end
if writes then redis.call('SETNX', KEYS[2], ARGV[2]) end
return {num_tenants, num_keys, num_aliases, changed}
"""

# KEYS: a hash. ARGV: write; pairs.
FIELDS_LUA = """
local added = 0
for i = 2, #ARGV, 2 do
  if redis.call('HEXISTS', KEYS[1], ARGV[i]) == 0 then
    added = added + 1
    if ARGV[1] == '1' then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
  end
end
return added
"""

# KEYS: a string. ARGV: write; its value.
VALUE_LUA = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
if ARGV[1] == '1' then redis.call('SET', KEYS[1], ARGV[2]) end
return 1
"""

# KEYS: a record of usage, what is added of this backup. ARGV: write; 1 to add the counts to those
# of Redis, which had lost them, and 0 for the greater ones; seconds to live; pairs.
USAGE_LUA = """
local writes, adds, changed = ARGV[1] == '1', ARGV[2] == '1', 0
if adds and redis.call('HEXISTS', KEYS[2], KEYS[1]) == 1 then return 0 end
for i = 4, #ARGV, 2 do
  local present = tonumber(redis.call('HGET', KEYS[1], ARGV[i]) or '0')
  local total = tonumber(ARGV[i + 1])
  if adds then total = total + present end
  if total > present then
    changed = 1
    if writes then redis.call('HSET', KEYS[1], ARGV[i], string.format('%.0f', total)) end
  end
end
if writes and changed == 1 then redis.call('EXPIRE', KEYS[1], ARGV[3]) end
if writes and adds then redis.call('HSET', KEYS[2], KEYS[1], 1) end
return changed
"""

# KEYS: a stream. ARGV: write; lines as msgpack: id, then fields and values; oldest first. A stream
# takes no line before its last one: it is written anew.
LINES_LUA = """
local function before(a, b)
  local a1, a2 = a:match('(%d+)-(%d+)')
  local b1, b2 = b:match('(%d+)-(%d+)')
  if a1 ~= b1 then return tonumber(a1) < tonumber(b1) end
  return tonumber(a2) < tonumber(b2)
end
local lines, known, added = redis.call('XREVRANGE', KEYS[1], '+', '-'), {}, 0
for _, line in ipairs(lines) do known[line[1]] = true end
for _, line in ipairs(cmsgpack.unpack(ARGV[2])) do
  if not known[line[1]] then
    lines[#lines + 1] = line
    added = added + 1
  end
end
if ARGV[1] ~= '1' or added == 0 then return added end
table.sort(lines, function(a, b) return before(a[1], b[1]) end)
redis.call('DEL', KEYS[1])
for _, line in ipairs(lines) do redis.call('XADD', KEYS[1], line[1], unpack(line[2])) end
return added
"""

# KEYS: as of `response_keys`, RECORD_KEYS. ARGV: write; id, data, previous id, time of its last
# use, of its end, now; tenant, its creation, and a region and a class that its record allows.
# Returns -1 if the tenant allows no texts any more.
RESPONSE_LUA = (
    MAY_STORE_LUA
    + CHANGES_LUA
    + """
local start, id, data = KEYS[1], ARGV[2], ARGV[3]
if ARGV[1] == '1' and not may_store(KEYS[8], KEYS[9], unpack(ARGV, 8, 11)) then return -1 end
if redis.call('EXISTS', start .. id) == 1 then return 0 end
if ARGV[1] ~= '1' then return 1 end
local life = math.max(1, math.ceil(tonumber(ARGV[6]) - tonumber(ARGV[7])))
remove(start, id)
redis.call('HSET', start .. id, 'data', data, 'previous', ARGV[4])
redis.call('EXPIRE', start .. id, life)
redis.call('ZADD', KEYS[2], ARGV[5], id)
redis.call('ZADD', KEYS[3], ARGV[6], id)
redis.call('HSET', KEYS[4], id, #data)
redis.call('HINCRBY', KEYS[4], 'total', #data)
for place = 2, 4 do
  if redis.call('TTL', KEYS[place]) < life then redis.call('EXPIRE', KEYS[place], life) end
end
add_up(start)
return 1
"""
)

# KEYS: counters that only grow. ARGV: write; the least value of one that is not there. After a loss
# of all records none has again a value that a reader has seen.
COUNTERS_LUA = """
for _, key in ipairs(KEYS) do
  if ARGV[1] == '1' then redis.call('SETNX', key, ARGV[2]) end
end
return 0
"""
