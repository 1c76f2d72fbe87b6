"""Decides whose job a free process runs next. Does no I/O.

    waiting ──next──▶ running ──ended──▶ removed

A round gives each waiting tenant one turn, so a tenant waits for at most one job of each other
tenant per process. Within a round the tenant with the least CPU seconds goes first, and a tenant
whose job reached the CPU limit goes last. CPU seconds are halved each round, so that old work
counts less and idle tenants are forgotten. A tenant holds at most `max_running` processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Job = TypeVar("Job")
FORGOTTEN_S = 1e-6


@dataclass(slots=True)
class _TenantTurns(Generic[Job]):
    arrived: int
    waiting: deque[Job] = field(default_factory=deque)
    num_running: int = 0
    cpu_s: float = 0.0
    had_turn: bool = False
    reached_limit: bool = False

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.num_running and self.cpu_s < FORGOTTEN_S


class FairTurns(Generic[Job]):
    def __init__(self, max_running: int) -> None:
        """`max_running`: the jobs of one tenant that may run at the same time."""
        self._max_running = max_running
        self._tenants: dict[str, _TenantTurns[Job]] = {}
        self._num_arrivals = 0

    @property
    def num_waiting(self) -> int:
        tenants = list(self._tenants.values())  # any thread may call
        return sum(len(each.waiting) for each in tenants)

    def add(self, tenant_id: str, job: Job) -> None:
        self._num_arrivals += 1
        tenant = self._tenants.setdefault(tenant_id, _TenantTurns(self._num_arrivals))
        tenant.waiting.append(job)

    def remove(self, tenant_id: str, job: Job) -> None:
        """Removes a job that has not started. Does nothing for any other."""
        tenant = self._tenants.get(tenant_id)
        if tenant is not None and job in tenant.waiting:
            tenant.waiting.remove(job)

    def next(self) -> tuple[str, Job] | None:
        """Starts the next job. Returns None if no tenant may start one."""
        ready = [each for each in self._tenants.items() if self._may_start(each[1])]
        if not ready:
            return None
        if all(tenant.had_turn for _, tenant in ready):
            self._begin_round()
        tenant_id, tenant = min(ready, key=lambda each: _rank(each[1]))
        tenant.had_turn, tenant.reached_limit = True, False
        tenant.num_running += 1
        return tenant_id, tenant.waiting.popleft()

    def take_more(self, tenant_id: str, max_jobs: int, is_like: Callable[[Job], bool]) -> list[Job]:
        """Returns the tenant's next jobs of the same kind, which share the turn that `next`
        returned.
        """
        waiting = self._tenants[tenant_id].waiting
        taken: list[Job] = []
        while waiting and len(taken) < max_jobs and is_like(waiting[0]):
            taken.append(waiting.popleft())
        return taken

    def put_back(self, tenant_id: str, jobs: Sequence[Job]) -> None:
        """Makes jobs of a turn that have not run the tenant's next ones."""
        self._tenants[tenant_id].waiting.extendleft(reversed(jobs))

    def ended(self, tenant_id: str, cpu_s: float, *, reached_limit: bool = False) -> None:
        """Ends a turn that `next` returned. `cpu_s`: the CPU seconds of all its jobs."""
        tenant = self._tenants[tenant_id]
        tenant.num_running -= 1
        tenant.cpu_s += cpu_s
        tenant.reached_limit = reached_limit

    def take_all(self) -> list[Job]:
        """Removes and returns all jobs that have not started."""
        jobs = [job for tenant in self._tenants.values() for job in tenant.waiting]
        for tenant in self._tenants.values():
            tenant.waiting.clear()
        return jobs

    def _may_start(self, tenant: _TenantTurns[Job]) -> bool:
        return bool(tenant.waiting) and tenant.num_running < self._max_running

    def _begin_round(self) -> None:
        for tenant_id, tenant in list(self._tenants.items()):
            tenant.had_turn = False
            tenant.cpu_s /= 2
            if tenant.is_idle:
                del self._tenants[tenant_id]


def _rank(tenant: _TenantTurns[Job]) -> tuple[bool, bool, float, int]:
    return tenant.had_turn, tenant.reached_limit, tenant.cpu_s, tenant.arrived
