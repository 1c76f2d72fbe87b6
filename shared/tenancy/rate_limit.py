"""One tenant's use of its limits: what is used up of each minute, and what is under way.

The rates are GCRA in the form of a meter: `used` grows by what a request costs, drains evenly by
the limit in a minute, and may not rise above the limit. (ITU-T I.371, the continuous-state leaky
bucket.) A request under way holds a lease, so that the requests of a gateway that died stop
counting; output tokens are charged as reserved and given back as far as they were not drawn, once,
with the lease.

`RateLimitCounter` is the limit of one gateway while Redis is away. `APPLY_LUA` is the same in
Redis, for all gateways at once: a test compares them.
"""

from __future__ import annotations

import msgspec

from shared.tenancy.tenant import LIMITS, TenantRecord

RATES = ("requests_per_min", "input_tokens_per_min", "output_tokens_per_min")
MINUTE_S = 60.0
LEASE_S = 15.0  # of a request under way
ROUNDING = 1e-6  # of a token
CONCURRENCY_RETRY_S = 1.0  # nobody knows when a request ends
IDLE_S = 120  # after twice a minute an unused meter is empty


def enforced_limits(tenant: TenantRecord) -> dict[str, int]:
    """The limits that the meter knows."""
    named = {name: getattr(tenant, name) for name in LIMITS if name != "kv_quota_tokens"}
    return {name: limit for name, limit in named.items() if limit is not None}


class Settled(msgspec.Struct, frozen=True, array_like=True):
    """A request that has ended, and the output tokens that it left unused."""

    lease_id: str
    num_unused_tokens: int


class RequestedTokens(msgspec.Struct, frozen=True, array_like=True):
    """A request that wants in. `costs`: of each rate."""

    lease_id: str
    costs: dict[str, int]


class LimitCommand(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step does, in this order. `limits`: those that the tenant has."""

    limits: dict[str, int]
    lease_s: float
    settled: tuple[Settled, ...] = ()
    renewed: tuple[str, ...] = ()
    asked: RequestedTokens | None = None


class LimitState(msgspec.Struct, frozen=True):
    """`refused_by`: the limit that makes a request wait longest, and how long; else empty."""

    refused_by: str
    wait_s: float
    used: dict[str, float]
    num_open: int


class RateLimitCounter:
    def __init__(self) -> None:
        self._used = dict.fromkeys(RATES, 0.0)
        self._at: float | None = None
        self._leases: dict[str, float] = {}

    def is_idle(self, now: float) -> bool:
        return not self._leases and (self._at is None or now - self._at > IDLE_S)

    def apply(self, command: LimitCommand, now: float, *, is_forced: bool = False) -> LimitState:
        """`is_forced`: who asks is already in, and is only counted."""
        self._drain(command.limits, now)
        for each in command.settled:
            if self._leases.pop(each.lease_id, None) is not None:
                rest = self._used["output_tokens_per_min"] - each.num_unused_tokens
                self._used["output_tokens_per_min"] = max(0.0, rest)
        for lease_id in command.renewed:
            self._leases[lease_id] = now + command.lease_s
        self._leases = {name: until for name, until in self._leases.items() if until > now}
        refused_by, wait_s = "", 0.0
        if command.asked is not None:
            refused_by, wait_s = self._verdict(command.asked, command.limits)
            if is_forced or not refused_by:
                self._charge(command.asked, command, now)
        return LimitState(refused_by, wait_s, dict(self._used), len(self._leases))

    def _drain(self, limits: dict[str, int], now: float) -> None:
        elapsed_s = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        for name in RATES:
            limit = limits.get(name, 0)  # one that was lowered is not paid for by waiting longer
            rest = min(limit, self._used[name]) - elapsed_s * limit / MINUTE_S
            self._used[name] = max(0.0, rest)

    def _verdict(self, asked: RequestedTokens, limits: dict[str, int]) -> tuple[str, float]:
        refused_by, wait_s = "", 0.0
        if "concurrency" in limits and len(self._leases) >= limits["concurrency"]:
            refused_by, wait_s = "concurrency", CONCURRENCY_RETRY_S
        for name in RATES:
            excess = self._used[name] + asked.costs[name] - limits.get(name, 0)
            if name not in limits or excess <= ROUNDING:
                continue
            if excess * MINUTE_S / limits[name] > wait_s:
                refused_by, wait_s = name, excess * MINUTE_S / limits[name]
        return refused_by, wait_s

    def _charge(self, asked: RequestedTokens, command: LimitCommand, now: float) -> None:
        for name in RATES:
            if name in command.limits:
                self._used[name] += asked.costs[name]
        self._leases[asked.lease_id] = now + command.lease_s


# KEYS: the tenant's meter, its open requests. ARGV: the order as JSON.
APPLY_LUA = """
local order = cjson.decode(ARGV[1])
local limits = order.limits
local rates = {'requests_per_min', 'input_tokens_per_min', 'output_tokens_per_min'}
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6

local state = redis.call('HMGET', KEYS[1], 'at', unpack(rates))
local elapsed = math.max(0, now - (tonumber(state[1]) or now))
local used = {}
for i, name in ipairs(rates) do
  local limit = limits[name] or 0
  local before = math.min(limit, tonumber(state[i + 1]) or 0)
  used[name] = math.max(0, before - elapsed * limit / 60)
end

for _, each in ipairs(order.settled or {}) do
  if redis.call('ZREM', KEYS[2], each[1]) == 1 then
    used.output_tokens_per_min = math.max(0, used.output_tokens_per_min - each[2])
  end
end
local ending = string.format('%.6f', now + order.lease_s)
for _, lease in ipairs(order.renewed or {}) do
  redis.call('ZADD', KEYS[2], ending, lease)
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.6f', now))

local refused_by, wait = '', 0
if order.asked then
  local lease, costs = order.asked[1], order.asked[2]
  if limits.concurrency and redis.call('ZCARD', KEYS[2]) >= limits.concurrency then
    refused_by, wait = 'concurrency', 1
  end
  for _, name in ipairs(rates) do
    local limit = limits[name]
    local excess = limit and used[name] + costs[name] - limit
    if limit and excess > 1e-6 and excess * 60 / limit > wait then
      refused_by, wait = name, excess * 60 / limit
    end
  end
  if refused_by == '' then
    for _, name in ipairs(rates) do
      if limits[name] then used[name] = used[name] + costs[name] end
    end
    redis.call('ZADD', KEYS[2], ending, lease)
  end
end

local reply = {refused_by, string.format('%.17g', wait), redis.call('ZCARD', KEYS[2])}
redis.call('HSET', KEYS[1], 'at', string.format('%.6f', now))
for i, name in ipairs(rates) do
  reply[i + 3] = string.format('%.17g', used[name])
  redis.call('HSET', KEYS[1], name, reply[i + 3])
end
redis.call('EXPIRE', KEYS[1], 120)
if order.asked or order.renewed then
  redis.call('EXPIRE', KEYS[2], math.ceil(order.lease_s))
end
return reply
"""


def to_limit_state(reply: list[bytes | int]) -> LimitState:
    """What `APPLY_LUA` replied."""
    refused_by, wait_s, num_open, *used = reply
    assert isinstance(refused_by, bytes)
    amounts = dict(zip(RATES, map(float, used), strict=True))
    return LimitState(refused_by.decode(), float(wait_s), amounts, int(num_open))
