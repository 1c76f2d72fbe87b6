"""A gateway's share of the limits of another site's tenant. Pure; times are of its own clock.

    none ──step, state──▶ held ──spend──▶ held ──step──▶ held
      ▲                    └──no state for a term──┐
      └────────────────────────────────────────────┘

What is held is spent without asking the home (`lease_table.py` has the other side). A term counts
from when a step was sent, at home from when it came: a share ends here before it ends there. While
a step is under way, what its requests need is reserved for them.

How much a share holds ahead follows what the tenant's requests here have cost lately; a share that
nobody uses, and one of a contended tenant, is given back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil, exp, inf

from shared.messages import LeaseState, LeaseStep
from shared.tenancy.leases.lease_table import CONTENDED_S, OUTPUT
from shared.tenancy.leases.rates import METERED, MINUTE_S, RATES

DEMAND_S = 4.0  # of whose costs as much is held ahead
IDLE_S = 10.0  # then nothing is
REPORT_S = 1.0  # after a change
REFILL_S = 0.1
RENEW_S = 2.0  # so that a contended share comes back soon
RENEW_OPEN_S = 5.0  # of open requests alone
FIRST_PART = 16  # of a limit, held ahead of the first request that costs any of it
MAX_PART = 4


class LimitShare:
    def __init__(self, name: str, term_s: float) -> None:
        """`name` is unlike that of any other share of this gateway, also of an earlier start."""
        self._name, self._term_s = name, term_s
        self._num_terms = 0
        self._slots: set[str] = set()  # open requests
        self._demand = dict.fromkeys(METERED, 0.0)
        self._last_costs: dict[str, int] = {}
        self._spent_at = self._asked_at = self._sent_at = self._contended_until = -inf
        self._sent_open = 0
        self._used: Mapping[str, float] = {}
        self._used_at, self._num_open_elsewhere = 0.0, 0
        self._own_spent: Counter[str] = Counter()  # since the last state
        self._reset()

    def _reset(self) -> None:
        self._lease_id = f"{self._name}.{self._num_terms}"
        self._num_terms += 1
        self._number, self._ends_at = 0, inf
        self._pool, self._reserved = Counter[str](), Counter[str]()
        self._num_slots = 0  # open requests and those that may be opened
        self._spent, self._sent_spent = Counter[str](), Counter[str]()
        self._num_refunded = self._sent_refunded = 0
        self._charged: set[str] = set()  # open requests of this term
        self._since: Counter[str] | None = None  # costs since the step that is under way

    @property
    def num_open(self) -> int:
        return len(self._slots)

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing, and has nothing to report."""
        return not self._slots and not any(self._pools().values()) and not self._has_changes

    @property
    def _has_changes(self) -> bool:
        now = (self._spent, self._num_refunded, len(self._slots))
        return now != (self._sent_spent, self._sent_refunded, self._sent_open)

    # ── spending ─────────────────────────────────────────────────────────────────────────────────

    def covers(self, costs: Mapping[str, int], limits: Mapping[str, int], now: float) -> bool:
        self._expire(now)
        pool = self._pools()
        return self._ends_at != inf and all(
            costs.get(name, 0) <= pool[name] - self._reserved[name] for name in limits
        )

    def spend(
        self, lease_id: str, costs: Mapping[str, int], now: float, *, replaces: str = ""
    ) -> None:
        """Charges a request, which takes the place of an open one if it `replaces` it."""
        self._charged.add(lease_id)
        for name in METERED:
            cost = costs.get(name, 0)
            self._demand[name] = self._demand[name] * self._fade(now) + cost
            if cost:
                self._last_costs[name] = cost
        self._spent_at = now
        for name in RATES:
            self._move(name, costs.get(name, 0))
        self.open(lease_id, replaces=replaces)

    def open(self, lease_id: str, *, replaces: str = "") -> None:
        """Counts an open request, whoever has admitted it."""
        self._slots.discard(replaces)
        self._charged.discard(replaces)
        self._slots.add(lease_id)

    def end(self, lease_id: str, num_unused_tokens: int) -> None:
        """Ends a request and takes back output tokens that it did not use. Idempotent."""
        self._slots.discard(lease_id)
        if lease_id not in self._charged:
            return
        self._charged.discard(lease_id)
        unsent = min(num_unused_tokens, self._spent[OUTPUT] - self._sent_spent[OUTPUT])
        self._move(OUTPUT, -unsent)
        self._num_refunded += num_unused_tokens - unsent
        self._own_spent[OUTPUT] -= num_unused_tokens - unsent

    def _move(self, name: str, cost: int) -> None:
        self._spent[name] += cost
        self._pool[name] = max(0, self._pool[name] - cost)
        self._own_spent[name] += cost
        if self._since is not None:
            self._since[name] += cost

    def _pools(self) -> Counter[str]:
        pool = Counter(self._pool)
        pool["concurrency"] = max(0, self._num_slots - len(self._slots))
        return pool

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def is_due(self, limits: Mapping[str, int], now: float) -> bool:
        """Whether the home should hear of the share, whose requests do not wait."""
        self._expire(now)
        since_s = now - self._sent_at
        if any(self._pools().values()):
            renew_s = REPORT_S if self._is_idle(now) else RENEW_S
        else:
            renew_s = RENEW_OPEN_S if self._slots else inf
        is_changed = self._has_changes and since_s >= REPORT_S
        return is_changed or since_s >= renew_s or self.is_low(limits, now)

    def is_low(self, limits: Mapping[str, int], now: float) -> bool:
        """Whether less than half of what should be held ahead is."""
        pool = self._pools()
        if now - self._sent_at < REFILL_S:
            return False
        return any(2 * pool[name] < ahead for name, ahead in self._ahead(limits, now).items())

    def has_excess(self, limits: Mapping[str, int], now: float) -> bool:
        """Whether it is contended and holds more than its requests need."""
        return now < self._contended_until and any(self._pools()[name] for name in limits)

    def step(
        self, asked: Sequence[Mapping[str, int]], limits: Mapping[str, int], now: float
    ) -> LeaseStep:
        """Returns the next step: `asked` are the costs of requests that wait."""
        self._expire(now)
        self._number += 1
        if asked:
            self._asked_at = now
        pool, ahead = self._pools(), self._ahead(limits, now)
        needed = Counter[str]()
        for costs in asked:
            needed.update(costs)
        for name in METERED:
            self._reserved[name] = min(pool[name], needed[name])
            pool[name] = min(pool[name], self._reserved[name] + ahead.get(name, 0))
            self._pool[name] = pool[name]
        self._num_slots = len(self._slots) + pool["concurrency"]
        self._sent_at, self._since = now, Counter()
        self._sent_spent, self._sent_refunded = Counter(self._spent), self._num_refunded
        self._sent_open = len(self._slots)
        return LeaseStep(
            lease_id=self._lease_id,
            number=self._number,
            spent={name: self._spent[name] for name in RATES if name in limits},
            num_refunded=self._num_refunded,
            pool={name: pool[name] for name in limits},
            num_open=self._sent_open,
            asked=tuple(dict(each) for each in asked),
            ahead=ahead,
        )

    def take(self, step: LeaseStep, state: LeaseState, now: float) -> bool:
        """Takes the state after `step`, the last one. Returns False if its share has ended."""
        self._expire(now)
        if step.lease_id != self._lease_id or self._since is None:
            return False
        pool = _given(step, state)
        for name in RATES:
            self._pool[name] = max(0, pool[name] - self._since[name])
        self._num_slots = step.num_open + pool["concurrency"]
        self._ends_at = self._sent_at + self._term_s
        if state.is_contended:
            self._contended_until = now + CONTENDED_S
        self._used, self._used_at = state.used, now
        self._num_open_elsewhere = max(0, state.num_open - step.num_open)
        self._own_spent = Counter(self._since)
        self.release()
        return True

    def give_back(self) -> None:
        """Holds nothing ahead from the next step on, until a request asks."""
        self._spent_at = self._asked_at = -inf

    def release(self) -> None:
        """Ends the reservation of the step that was under way."""
        self._reserved.clear()
        self._since = None

    def used(self, limits: Mapping[str, int], now: float) -> dict[str, float]:
        """Returns what is used of each rate at all sites, as far as this gateway knows."""
        since_s = now - self._used_at
        found = dict.fromkeys(RATES, 0.0)
        for name in set(found).intersection(limits):
            drained = self._used.get(name, 0.0) - since_s * limits[name] / MINUTE_S
            found[name] = max(0.0, max(0.0, drained) + self._own_spent[name])
        return found

    @property
    def num_open_everywhere(self) -> int:
        return self._num_open_elsewhere + len(self._slots)

    def _ahead(self, limits: Mapping[str, int], now: float) -> dict[str, int]:
        """Returns what should be held ahead of each limit."""
        if self._is_idle(now) or now < self._contended_until:
            return {}
        fade = self._fade(now)
        found = {}
        for name, limit in limits.items():
            last = self._last_costs.get(name)
            if last is None:
                found[name] = limit // FIRST_PART
                continue
            most = max(limit // MAX_PART, min(last, limit // 2))
            found[name] = min(most, max(last, ceil(self._demand[name] * fade)))
        return found

    def _fade(self, now: float) -> float:
        return exp((self._spent_at - now) / DEMAND_S)

    def _is_idle(self, now: float) -> bool:
        return now - max(self._spent_at, self._asked_at) >= IDLE_S

    def _expire(self, now: float) -> None:
        """Drops a share whose term is over: the home counts it as spent."""
        if now >= self._ends_at:
            self._reset()


def _given(step: LeaseStep, state: LeaseState) -> Counter[str]:
    """Returns what the share holds after `step`: at most what it has reported and asked for. What a
    contended home gives beyond that would be given back, without an end.
    """
    most = Counter(step.pool)
    for costs in (step.ahead, *step.asked):
        most.update(costs)
    return Counter({name: min(num, most[name]) for name, num in state.pool.items()})
