"""A tenant's use of its limits: the used part of each rate, and the number of open requests.

The rates are GCRA in the form of a meter: `used` grows by the cost of a request, drains evenly by
the limit per minute, and may not exceed the limit. (ITU-T I.371, the continuous-state leaky
bucket.) An open request holds a lease, so that the requests of a crashed gateway stop counting.
Output tokens are charged as reserved; the unused ones are refunded once, when the lease ends.

`RateLimitCounter` is the limit of one gateway while Redis is unavailable. `APPLY_LUA` is the same
algorithm in Redis, for all gateways together: a test compares them.
"""

from __future__ import annotations

import msgspec

from shared.messages import LeaseState, LeaseStep
from shared.tenancy.leases.lease_script import LEASES
from shared.tenancy.leases.lease_table import LeaseTable, charge_all
from shared.tenancy.leases.rates import CONCURRENCY_RETRY_S, MINUTE_S, RATES, ROUNDING, drain_s
from shared.tenancy.tenant import LIMITS, TenantRecord

LEASE_S = 15.0  # of an open request, and of another site's share
IDLE_S = 120  # two minutes: an unused meter is empty


def enforced_limits(tenant: TenantRecord) -> dict[str, int]:
    """Returns the limits that the meter enforces and the tenant has, by name."""
    named = {name: getattr(tenant, name) for name in LIMITS if name != "kv_quota_tokens"}
    return {name: limit for name, limit in named.items() if limit is not None}


class Settled(msgspec.Struct, frozen=True, array_like=True):
    """An ended request, and the number of reserved output tokens that it did not use."""

    lease_id: str
    num_unused_tokens: int


class RequestedTokens(msgspec.Struct, frozen=True, array_like=True):
    """A request to admit, with its `costs` by rate name."""

    lease_id: str
    costs: dict[str, int]


class LimitCommand(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The operations of one step, in this order. `limits` are those that the tenant has. `leased`
    is a step of the share that `holder` has, `{site}/{gateway}` of another site.
    """

    limits: dict[str, int]
    lease_s: float
    settled: tuple[Settled, ...] = ()
    renewed: tuple[str, ...] = ()
    asked: RequestedTokens | None = None
    holder: str = ""
    leased: LeaseStep | None = None


class LimitState(msgspec.Struct, frozen=True):
    """The result of a check. `rejected_by` is the exceeded limit with the longest wait, `wait_s`;
    empty if admitted. What other sites hold counts as used. `leased` is the result of such a step.
    """

    rejected_by: str
    wait_s: float
    used: dict[str, float]
    num_open: int
    leased: LeaseState | None = None


class RateLimitCounter:
    def __init__(self) -> None:
        self._used = dict.fromkeys(RATES, 0.0)
        self._at: float | None = None
        self._leases: dict[str, float] = {}
        self._shares = LeaseTable()

    def is_idle(self, now: float) -> bool:
        has_leases = bool(self._leases or self._shares)
        return not has_leases and (self._at is None or now - self._at > IDLE_S)

    def apply(self, command: LimitCommand, now: float, *, is_forced: bool = False) -> LimitState:
        """Runs one step. If `is_forced`, the request is already admitted, and is only charged."""
        for ended_at, pool in self._shares.take_ended(now):
            self._drain(command.limits, ended_at)
            charge_all(pool, self._used)
        self._drain(command.limits, now)
        for each in command.settled:
            if self._leases.pop(each.lease_id, None) is not None:
                rest = self._used["output_tokens_per_min"] - each.num_unused_tokens
                self._used["output_tokens_per_min"] = max(0.0, rest)
        self._leases = {name: until for name, until in self._leases.items() if until > now}
        for lease_id in command.renewed:
            self._leases[lease_id] = now + command.lease_s
        rejected_by, wait_s = "", 0.0
        if command.asked is not None:
            rejected_by, wait_s = self._verdict(command.asked, command.limits)
            if is_forced or not rejected_by:
                self._charge(command.asked, command, now)
            else:
                wait_s = self._shares.contend(rejected_by, wait_s, now)
        leased = None if command.leased is None else self._lease(command, command.leased, now)
        used = {name: self._used[name] + self._shares.held(name) for name in RATES}
        num_open = len(self._leases) + self._shares.held("concurrency")
        return LimitState(rejected_by, wait_s, used, num_open, leased)

    def _lease(self, command: LimitCommand, step: LeaseStep, now: float) -> LeaseState:
        return self._shares.apply(
            command.holder,
            step,
            command.limits,
            self._used,
            num_open=len(self._leases),
            now=now,
            lease_s=command.lease_s,
        )

    def _drain(self, limits: dict[str, int], now: float) -> None:
        elapsed_s = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        for name in RATES:
            limit = limits.get(name, 0)  # `used` above a lowered limit adds no waiting time
            rest = min(limit, self._used[name]) - elapsed_s * limit / MINUTE_S
            self._used[name] = max(0.0, rest)

    def _verdict(self, requested: RequestedTokens, limits: dict[str, int]) -> tuple[str, float]:
        rejected_by, wait_s = "", 0.0
        num_open = len(self._leases) + self._shares.held("concurrency")
        if "concurrency" in limits and num_open >= limits["concurrency"]:
            rejected_by, wait_s = "concurrency", CONCURRENCY_RETRY_S
        for name in RATES:
            used = self._used[name] + self._shares.held(name)
            excess = used + requested.costs[name] - limits.get(name, 0)
            if name not in limits or excess <= ROUNDING:
                continue
            if drain_s(excess, limits[name]) > wait_s:
                rejected_by, wait_s = name, drain_s(excess, limits[name])
        return rejected_by, wait_s

    def _charge(self, requested: RequestedTokens, command: LimitCommand, now: float) -> None:
        for name in RATES:
            if name in command.limits:
                self._used[name] += requested.costs[name]
        self._leases[requested.lease_id] = now + command.lease_s


_APPLY = (
    f"""
local rates = {{{", ".join(f"'{name}'" for name in RATES)}}}
{LEASES}"""
    + """
local function apply(meter, open, order)
  local limits = order.limits
  local time = redis.call('TIME')
  local now = tonumber(time[1]) + tonumber(time[2]) / 1e6

  local state = redis.call('HMGET', meter, 'leases', 'contended', 'at', unpack(rates))
  local leases = state[1] and cjson.decode(state[1]) or {}
  local contended = tonumber(state[2]) or 0
  local used, at = {}, tonumber(state[3]) or now
  for i, name in ipairs(rates) do used[name] = tonumber(state[i + 3]) or 0 end
  local function drain(time)
    local elapsed = math.max(0, time - at)
    at = time
    for _, name in ipairs(rates) do
      local limit = limits[name] or 0
      used[name] = math.max(0, math.min(limit, used[name]) - elapsed * limit / 60)
    end
  end
  for _, lease in ipairs(take_ended(leases, now)) do
    drain(lease.ends)
    charge_all(lease, used)
  end
  drain(now)

  for _, each in ipairs(order.settled or {}) do
    if redis.call('ZREM', open, each[1]) == 1 then
      used.output_tokens_per_min = math.max(0, used.output_tokens_per_min - each[2])
    end
  end
  redis.call('ZREMRANGEBYSCORE', open, '-inf', string.format('%.6f', now))
  local ending = string.format('%.6f', now + order.lease_s)
  for _, lease in ipairs(order.renewed or {}) do
    redis.call('ZADD', open, ending, lease)
  end

  local refused_by, wait = '', 0
  if order.asked then
    local lease, costs = order.asked[1], order.asked[2]
    local _, slots = held_of(leases, 'concurrency')
    if limits.concurrency and redis.call('ZCARD', open) + slots >= limits.concurrency then
      refused_by, wait = 'concurrency', 1
    end
    for _, name in ipairs(rates) do
      local limit = limits[name]
      local excess = limit and used[name] + held_of(leases, name) + costs[name] - limit
      if limit and excess > 1e-6 and excess * 60 / limit > wait then
        refused_by, wait = name, excess * 60 / limit
      end
    end
    if refused_by == '' then
      for _, name in ipairs(rates) do
        if limits[name] then used[name] = used[name] + costs[name] end
      end
      redis.call('ZADD', open, ending, lease)
    else
      contended, wait = contend(leases, contended, refused_by, wait, now)
    end
  end

  local num_open, leased = redis.call('ZCARD', open), ''
  if order.leased then
    contended, leased = lease_step(leases, contended, order, used, num_open, now)
    leased = cjson.encode(leased)
  end
  local _, slots = held_of(leases, 'concurrency')
  local reply = {refused_by, string.format('%.17g', wait), num_open + slots, leased}
  redis.call('HSET', meter, 'at', string.format('%.6f', now))
  for i, name in ipairs(rates) do
    redis.call('HSET', meter, name, string.format('%.17g', used[name]))
    reply[i + 4] = string.format('%.17g', used[name] + held_of(leases, name))
  end
  if next(leases) then
    redis.call('HSET', meter, 'leases', cjson.encode(leases), 'contended', contended)
  elseif state[1] then
    redis.call('HDEL', meter, 'leases', 'contended')
  end
  redis.call('EXPIRE', meter, 120)
  if order.asked or order.renewed then
    redis.call('EXPIRE', open, math.ceil(order.lease_s))
  end
  return reply
end
"""
)

# KEYS: the tenant's meter, its open requests. ARGV: the LimitCommand as JSON.
APPLY_LUA = _APPLY + "return apply(KEYS[1], KEYS[2], cjson.decode(ARGV[1]))"

# KEYS: those two of each tenant. ARGV: their LimitCommands as a JSON list. Returns the index and
# the error of each tenant whose record has a wrong type, which does not stop the others.
APPLY_EACH_LUA = (
    _APPLY
    + """
local failed = {}
for i, order in ipairs(cjson.decode(ARGV[1])) do
  local is_applied, reply = pcall(apply, KEYS[2 * i - 1], KEYS[2 * i], order)
  if not is_applied then
    local reason = type(reply) == 'table' and reply.err or tostring(reply)
    failed[#failed + 1] = {i - 1, reason}
  end
end
return failed
"""
)


def to_limit_state(reply: list[bytes | int]) -> LimitState:
    """Decodes the reply of `APPLY_LUA`."""
    rejected_by, wait_s, num_open, leased, *used = reply
    assert isinstance(rejected_by, bytes) and isinstance(leased, bytes)
    amounts = dict(zip(RATES, map(float, used), strict=True))
    state = msgspec.json.decode(leased, type=LeaseState) if leased else None
    return LimitState(rejected_by.decode(), float(wait_s), amounts, int(num_open), state)
