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

from shared.tenancy.tenant import LIMITS, TenantRecord

RATES = ("requests_per_min", "input_tokens_per_min", "output_tokens_per_min")
MINUTE_S = 60.0
LEASE_S = 15.0  # lease of an open request
ROUNDING = 1e-6  # part of a token
CONCURRENCY_RETRY_S = 1.0  # the end of a request cannot be predicted
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
    """The operations of one step, in this order. `limits` are those that the tenant has. With
    `renews_open_only` a lease that has ended stays so, instead of being opened again.
    """

    limits: dict[str, int]
    lease_s: float
    settled: tuple[Settled, ...] = ()
    renewed: tuple[str, ...] = ()
    asked: RequestedTokens | None = None
    renews_open_only: bool = False


class LimitState(msgspec.Struct, frozen=True):
    """The result of a check. `rejected_by` is the exceeded limit with the longest wait, `wait_s`;
    empty if admitted.
    """

    rejected_by: str
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
        """Runs one step. If `is_forced`, the request is already admitted, and is only charged."""
        self._drain(command.limits, now)
        for each in command.settled:
            if self._leases.pop(each.lease_id, None) is not None:
                rest = self._used["output_tokens_per_min"] - each.num_unused_tokens
                self._used["output_tokens_per_min"] = max(0.0, rest)
        self._leases = {name: until for name, until in self._leases.items() if until > now}
        for lease_id in command.renewed:
            if command.renews_open_only and lease_id not in self._leases:
                continue
            self._leases[lease_id] = now + command.lease_s
        rejected_by, wait_s = "", 0.0
        if command.asked is not None:
            rejected_by, wait_s = self._verdict(command.asked, command.limits)
            if is_forced or not rejected_by:
                self._charge(command.asked, command, now)
        return LimitState(rejected_by, wait_s, dict(self._used), len(self._leases))

    def _drain(self, limits: dict[str, int], now: float) -> None:
        elapsed_s = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        for name in RATES:
            limit = limits.get(name, 0)  # `used` above a lowered limit adds no waiting time
            rest = min(limit, self._used[name]) - elapsed_s * limit / MINUTE_S
            self._used[name] = max(0.0, rest)

    def _verdict(self, requested: RequestedTokens, limits: dict[str, int]) -> tuple[str, float]:
        rejected_by, wait_s = "", 0.0
        if "concurrency" in limits and len(self._leases) >= limits["concurrency"]:
            rejected_by, wait_s = "concurrency", CONCURRENCY_RETRY_S
        for name in RATES:
            excess = self._used[name] + requested.costs[name] - limits.get(name, 0)
            if name not in limits or excess <= ROUNDING:
                continue
            if excess * MINUTE_S / limits[name] > wait_s:
                rejected_by, wait_s = name, excess * MINUTE_S / limits[name]
        return rejected_by, wait_s

    def _charge(self, requested: RequestedTokens, command: LimitCommand, now: float) -> None:
        for name in RATES:
            if name in command.limits:
                self._used[name] += requested.costs[name]
        self._leases[requested.lease_id] = now + command.lease_s


_APPLY = """
local function apply(meter, open, order)
  local limits = order.limits
  local rates = {'requests_per_min', 'input_tokens_per_min', 'output_tokens_per_min'}
  local time = redis.call('TIME')
  local now = tonumber(time[1]) + tonumber(time[2]) / 1e6

  local state = redis.call('HMGET', meter, 'at', unpack(rates))
  local elapsed = math.max(0, now - (tonumber(state[1]) or now))
  local used = {}
  for i, name in ipairs(rates) do
    local limit = limits[name] or 0
    local before = math.min(limit, tonumber(state[i + 1]) or 0)
    used[name] = math.max(0, before - elapsed * limit / 60)
  end

  for _, each in ipairs(order.settled or {}) do
    if redis.call('ZREM', open, each[1]) == 1 then
      used.output_tokens_per_min = math.max(0, used.output_tokens_per_min - each[2])
    end
  end
  redis.call('ZREMRANGEBYSCORE', open, '-inf', string.format('%.6f', now))
  local ending = string.format('%.6f', now + order.lease_s)
  for _, lease in ipairs(order.renewed or {}) do
    if not order.renews_open_only then
      redis.call('ZADD', open, ending, lease)
    else
      redis.call('ZADD', open, 'XX', ending, lease)
    end
  end

  local refused_by, wait = '', 0
  if order.asked then
    local lease, costs = order.asked[1], order.asked[2]
    if limits.concurrency and redis.call('ZCARD', open) >= limits.concurrency then
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
      redis.call('ZADD', open, ending, lease)
    end
  end

  local reply = {refused_by, string.format('%.17g', wait), redis.call('ZCARD', open)}
  redis.call('HSET', meter, 'at', string.format('%.6f', now))
  for i, name in ipairs(rates) do
    reply[i + 3] = string.format('%.17g', used[name])
    redis.call('HSET', meter, name, reply[i + 3])
  end
  redis.call('EXPIRE', meter, 120)
  if order.asked or order.renewed then
    redis.call('EXPIRE', open, math.ceil(order.lease_s))
  end
  return reply
end
"""

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
    rejected_by, wait_s, num_open, *used = reply
    assert isinstance(rejected_by, bytes)
    amounts = dict(zip(RATES, map(float, used), strict=True))
    return LimitState(rejected_by.decode(), float(wait_s), amounts, int(num_open))
