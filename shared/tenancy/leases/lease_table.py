"""The shares of a tenant's limits that gateways of other sites hold, as the home counts them.

A holder spends its share without asking. What it holds is taken from the limit and does not drain;
what it has spent drains from the time of its report. So the meter and all shares together never
exceed the limit, and neither does what is spent, whenever it is reported:

    held ──report of its spending──▶ used ──drains──▶ free
    held ──report without it──▶ free             given back
    held ──no report for a term──▶ used          it may have been spent

A holder that asks names the costs of each request, which it gets in whole or not at all, and how
much it wants ahead, of which it gets at most half of what is free. Where one is refused what others
hold unspent, the tenant is contended for a while: nobody gets more ahead, and holders give back.

Reports are numbered, and their totals only grow: one that comes twice or late changes nothing. Lua
has the same steps (`lease_script.py`): a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor
from operator import itemgetter

from shared.messages import LeaseState, LeaseStep
from shared.tenancy.leases.rates import CONCURRENCY_RETRY_S, RATES, ROUNDING, drain_s

OUTPUT = "output_tokens_per_min"
CONTENDED_S = 4.0  # longer than holders take to hear of it
GIVEN_BACK_S = 2.0
MAX_HOLDERS = 64  # of one tenant
MAX_FREE = 10**13  # that are shared out: a larger limit is none


@dataclass(slots=True)
class _Lease:
    """One holder's share. `pool` is what it may still spend, `num_open` its open requests, and
    `num_charged` its output tokens that may be refunded.
    """

    lease_id: str
    number: int
    spent: Mapping[str, int]
    num_refunded: int
    num_charged: int
    num_open: int
    pool: dict[str, int]
    ends_at: float


class LeaseTable:
    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}
        self._contended_until = 0.0

    def __bool__(self) -> bool:
        return bool(self._leases)

    def held(self, name: str) -> int:
        """Returns what all holders hold of a limit; of `concurrency` also their open requests."""
        has_open = name == "concurrency"
        every = self._leases.values()
        return sum(each.pool.get(name, 0) + has_open * each.num_open for each in every)

    def take_ended(self, now: float) -> list[tuple[float, dict[str, int]]]:
        """Removes the shares that have ended. Returns the times and what was held, in this order:
        it may have been spent, at the latest then.
        """
        ended = [holder for holder, each in self._leases.items() if each.ends_at <= now]
        found = [self._leases.pop(holder) for holder in ended]
        return sorted(((each.ends_at, each.pool) for each in found), key=itemgetter(0))

    def contend(self, name: str, wait_s: float, now: float, holder: str = "") -> float:
        """Notes that a request was refused what others than `holder` hold. Returns the time to
        wait.
        """
        others = (each for other, each in self._leases.items() if other != holder)
        if not any(each.pool.get(name, 0) for each in others):
            return wait_s
        self._contended_until = now + CONTENDED_S
        return min(wait_s, GIVEN_BACK_S)

    def apply(
        self,
        holder: str,
        step: LeaseStep,
        limits: Mapping[str, int],
        used: dict[str, float],
        *,
        num_open: int,
        now: float,
        lease_s: float,
    ) -> LeaseState:
        """Runs one step of a holder. `num_open` are the open requests of the home. A step that is
        out of order, or of one holder too many, gets no verdicts.
        """
        lease = self._reported(holder, step, limits, used)
        if lease is None:
            return LeaseState(pool={}, used={}, num_open=num_open, is_contended=False)
        free = {
            name: min(MAX_FREE, limit - used.get(name, num_open) - self.held(name))
            for name, limit in limits.items()
        }
        committed = dict.fromkeys(limits, 0)
        rejections = []
        for costs in step.asked:
            rejected_by, wait_s = _take(costs, lease.pool, free, committed, limits)
            if rejected_by:
                wait_s = self.contend(rejected_by, wait_s, now, holder)
            rejections.append((rejected_by, wait_s))
        is_contended = self._contended_until > now
        for name in limits:
            wanted = 0 if is_contended else step.ahead.get(name, 0) - lease.pool[name]
            lease.pool[name] += max(0, min(wanted, floor(free[name] / 2))) + committed[name]
        lease.ends_at = now + lease_s
        pool = lease.pool
        rates = [name for name in RATES if name in limits]
        return LeaseState(
            pool=dict(pool),
            rejections=tuple(rejections),
            used={name: used[name] + self.held(name) - pool[name] for name in rates},
            num_open=num_open + self.held("concurrency") - pool.get("concurrency", 0),
            is_contended=is_contended,
        )

    def _reported(
        self, holder: str, step: LeaseStep, limits: Mapping[str, int], used: dict[str, float]
    ) -> _Lease | None:
        """Returns the holder's lease with what the step reports."""
        lease = self._leases.get(holder)
        if lease is not None and lease.lease_id != step.lease_id:
            charge_all(lease.pool, used)
            lease = None
        if lease is None:
            if holder not in self._leases and len(self._leases) >= MAX_HOLDERS:
                return None
            lease = _Lease(step.lease_id, 0, step.spent, step.num_refunded, 0, 0, {}, 0.0)
            self._leases[holder] = lease
        elif step.number <= lease.number:
            return None
        num_slots = lease.pool.get("concurrency", 0) + lease.num_open
        lease.num_open = min(step.num_open, limits.get("concurrency", 0))
        known = {"concurrency": max(0, num_slots - lease.num_open)}
        for name in RATES:
            held = lease.pool.get(name, 0)
            spent = min(held, max(0, step.spent.get(name, 0) - lease.spent.get(name, 0)))
            known[name] = held - spent
            used[name] += spent if name in limits else 0
            lease.num_charged += spent if name == OUTPUT else 0
        refund = min(max(0, step.num_refunded - lease.num_refunded), lease.num_charged)
        lease.num_charged -= refund
        used[OUTPUT] = max(0.0, used[OUTPUT] - refund)
        lease.number, lease.spent, lease.num_refunded = step.number, step.spent, step.num_refunded
        lease.pool = {name: min(step.pool.get(name, 0), known[name]) for name in limits}
        return lease


def charge_all(pool: Mapping[str, int], used: dict[str, float]) -> None:
    for name in RATES:
        used[name] += pool.get(name, 0)


def _take(
    costs: Mapping[str, int],
    pool: dict[str, int],
    free: dict[str, float],
    committed: dict[str, int],
    limits: Mapping[str, int],
) -> tuple[str, float]:
    """Takes one request's costs from the holder's pool, and what that lacks from what is free.
    Returns the limit that rejects it, or "", and the time to wait.
    """
    lacks = {name: max(0, costs.get(name, 0) - pool[name]) for name in limits}
    rejected_by, wait_s = "", 0.0
    if lacks.get("concurrency", 0) > free.get("concurrency", 0):
        rejected_by, wait_s = "concurrency", CONCURRENCY_RETRY_S
    for name in RATES:
        excess = lacks.get(name, 0) - free.get(name, 0)
        if excess > ROUNDING and drain_s(excess, limits[name]) > wait_s:
            rejected_by, wait_s = name, drain_s(excess, limits[name])
    if not rejected_by:
        for name, lack in lacks.items():
            pool[name] -= costs.get(name, 0) - lack
            free[name] -= lack
            committed[name] += costs.get(name, 0)
    return rejected_by, wait_s
