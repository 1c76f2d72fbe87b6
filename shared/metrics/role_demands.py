"""The advice of all schedulers about workers, added up by model and role."""

from __future__ import annotations

from collections.abc import Iterable

from shared.messages import Heartbeat, RoleDemand

MAX_MODELS = 64  # further ones, by name, are left out


def total_demands(heartbeats: Iterable[Heartbeat]) -> list[RoleDemand]:
    """Sums demands by model and role. A request waits in one scheduler, but each sees all workers:
    queues are added, and of the wanted workers the most count.
    """
    totals: dict[tuple[str, str], RoleDemand] = {}
    for heartbeat in heartbeats:
        for each in () if heartbeat.scheduler is None else heartbeat.scheduler.demands:
            known = totals.get((each.model, each.role))
            totals[each.model, each.role] = each if known is None else _total(known, each)
    models = sorted({model for model, _ in totals})[:MAX_MODELS]
    return [totals[model, role] for model, role in sorted(totals) if model in models]


def _total(one: RoleDemand, other: RoleDemand) -> RoleDemand:
    return RoleDemand(
        model=one.model,
        role=one.role,
        num_queued_requests=one.num_queued_requests + other.num_queued_requests,
        num_queued_tokens=one.num_queued_tokens + other.num_queued_tokens,
        work_s=one.work_s + other.work_s,
        num_workers=max(one.num_workers, other.num_workers),
        num_wanted_workers=max(one.num_wanted_workers, other.num_wanted_workers),
    )
