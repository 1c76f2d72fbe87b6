"""`LeaseTable` in Lua, as a part of the scripts of `rate_limit.py`.

The shares of a tenant are one field of its meter, as JSON; a meter without shares has none. `rates`
lists the names of the rates.
"""

from __future__ import annotations

from shared.tenancy.leases.lease_table import CONTENDED_S, GIVEN_BACK_S, MAX_FREE, MAX_HOLDERS
from shared.tenancy.leases.rates import CONCURRENCY_RETRY_S

LEASES = f"""
local function held_of(leases, name, other)
  local unspent, open = 0, 0
  for holder, lease in pairs(leases) do
    if holder ~= other then
      unspent = unspent + (lease.pool[name] or 0)
      open = open + lease.open
    end
  end
  return unspent, name == 'concurrency' and unspent + open or unspent
end

local function charge_all(lease, used)
  for _, name in ipairs(rates) do used[name] = used[name] + (lease.pool[name] or 0) end
end

local function take_ended(leases, now)
  local found = {{}}
  for holder, lease in pairs(leases) do
    if lease.ends <= now then
      found[#found + 1] = lease
      leases[holder] = nil
    end
  end
  table.sort(found, function(a, b) return a.ends < b.ends end)
  return found
end

local function contend(leases, contended, name, wait, now, holder)
  if held_of(leases, name, holder) == 0 then return contended, wait end
  return now + {CONTENDED_S}, math.min(wait, {GIVEN_BACK_S})
end

local function reported(leases, holder, step, limits, used)
  local lease = leases[holder]
  local is_new = not lease
  if lease and lease.id ~= step.lease_id then
    charge_all(lease, used)
    lease = nil
  end
  local spent, refunded = step.spent or {{}}, step.num_refunded or 0
  if not lease then
    local holders = 0
    for _ in pairs(leases) do holders = holders + 1 end
    if is_new and holders >= {MAX_HOLDERS} then return nil end
    lease = {{id = step.lease_id, spent = spent, refunded = refunded, charged = 0, open = 0}}
    lease.pool = {{}}
    leases[holder] = lease
  elseif step.number <= lease.number then
    return nil
  end
  local slots = (lease.pool.concurrency or 0) + lease.open
  lease.open = math.min(step.num_open or 0, limits.concurrency or 0)
  local known = {{concurrency = math.max(0, slots - lease.open)}}
  for _, name in ipairs(rates) do
    local held = lease.pool[name] or 0
    local more = math.max(0, (spent[name] or 0) - (lease.spent[name] or 0))
    more = math.min(held, more)
    known[name] = held - more
    if limits[name] then used[name] = used[name] + more end
    if name == 'output_tokens_per_min' then lease.charged = lease.charged + more end
  end
  local refund = math.min(math.max(0, refunded - lease.refunded), lease.charged)
  lease.charged = lease.charged - refund
  used.output_tokens_per_min = math.max(0, used.output_tokens_per_min - refund)
  lease.number, lease.spent, lease.refunded = step.number, spent, refunded
  lease.pool = {{}}
  for name in pairs(limits) do
    lease.pool[name] = math.min((step.pool or {{}})[name] or 0, known[name])
  end
  return lease
end

local function take(costs, pool, free, committed, limits)
  local lacks, by, wait = {{}}, '', 0
  for name in pairs(limits) do lacks[name] = math.max(0, (costs[name] or 0) - pool[name]) end
  if limits.concurrency and lacks.concurrency > free.concurrency then
    by, wait = 'concurrency', {CONCURRENCY_RETRY_S}
  end
  for _, name in ipairs(rates) do
    local excess = limits[name] and lacks[name] - free[name] or 0
    if excess > 1e-6 and excess * 60 / limits[name] > wait then
      by, wait = name, excess * 60 / limits[name]
    end
  end
  if by == '' then
    for name, lack in pairs(lacks) do
      pool[name] = pool[name] - ((costs[name] or 0) - lack)
      free[name] = free[name] - lack
      committed[name] = committed[name] + (costs[name] or 0)
    end
  end
  return by, wait
end

local function lease_step(leases, contended, order, used, num_open, now)
  local holder, step, limits = order.holder, order.leased, order.limits
  local state = {{pool = {{}}, used = {{}}, num_open = num_open, is_contended = false}}
  local lease = reported(leases, holder, step, limits, used)
  if not lease then return contended, state end
  local free, committed = {{}}, {{}}
  for name, limit in pairs(limits) do
    local _, held = held_of(leases, name)
    free[name] = math.min({MAX_FREE}, limit - (used[name] or num_open) - held)
    committed[name] = 0
  end
  local rejections
  for _, costs in ipairs(step.asked or {{}}) do
    local by, wait = take(costs, lease.pool, free, committed, limits)
    if by ~= '' then contended, wait = contend(leases, contended, by, wait, now, holder) end
    rejections = rejections or {{}}
    rejections[#rejections + 1] = {{by, wait}}
  end
  state.is_contended = contended > now
  for name in pairs(limits) do
    local wanted = ((step.ahead or {{}})[name] or 0) - lease.pool[name]
    if state.is_contended then wanted = 0 end
    wanted = math.max(0, math.min(wanted, math.floor(free[name] / 2)))
    lease.pool[name] = lease.pool[name] + wanted + committed[name]
  end
  lease.ends = now + order.lease_s
  state.pool, state.rejections = lease.pool, rejections
  for _, name in ipairs(rates) do
    if limits[name] then state.used[name] = used[name] + held_of(leases, name, holder) end
  end
  local _, slots = held_of(leases, 'concurrency', holder)
  state.num_open = num_open + slots + lease.open
  return contended, state
end
"""
