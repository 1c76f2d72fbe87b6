"""Decides for each model whether a worker changes its role, and advises how many each role needs.

Any number of schedulers may do so: each sees the changes of the others in heartbeats, and a worker
refuses a second change within `role_change_min_s`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import structlog

from services.scheduler.backlog import ModelKey, QueuedRequest
from services.scheduler.fleet import WorkerFleet
from services.scheduler.roles.demand import QueuedWork, WorkerDemand, WorkerWork, demand_of
from services.scheduler.roles.policy import (
    ROLES,
    RoleChange,
    RolePolicy,
    split_of,
    wanted_workers,
)
from services.scheduler.roles.worker_rates import WorkerRates
from shared.config import SchedulerConfig
from shared.errors import HearthError
from shared.messages import (
    ChangeRoles,
    Done,
    Heartbeat,
    RoleDemand,
    SchedulerLoad,
    WorkerRole,
)
from shared.packing import TOKEN_ID_BYTES
from shared.subjects import lifecycle
from shared.transport.timed_requests import TimedRequests

log = structlog.get_logger(__name__)

CHANGE_TIMEOUT_S = 0.5  # plus the round trip
MAX_MODELS = 64  # models in a heartbeat


class RoleChanges:
    def __init__(
        self, config: SchedulerConfig, workers: WorkerFleet, requests: TimedRequests
    ) -> None:
        self._config = config
        self._workers = workers
        self._requests = requests
        self._rates = WorkerRates(workers.speed)
        self._policies: dict[ModelKey, RolePolicy] = {}
        self._demands: dict[str, list[RoleDemand]] = {}  # key: model name

    def on_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Records a heartbeat, after the fleet of workers has processed it."""
        if self._workers.knows(heartbeat.process_id):
            self._rates.on_heartbeat(heartbeat, now)
        else:
            self._rates.lost(heartbeat.process_id)

    def lost(self, worker_id: str) -> None:
        self._rates.lost(worker_id)

    def load(self) -> SchedulerLoad:
        """Returns the demands of the last decision."""
        demands = [each for name in sorted(self._demands) for each in self._demands[name]]
        return SchedulerLoad(demands=tuple(demands[: 2 * MAX_MODELS]))

    def decide(self, waiting: Iterable[QueuedRequest], now: float) -> list[RoleChange]:
        """Returns the changes of roles to make. The caller repeats it every few hundred
        milliseconds.

        Without automatic roles only the advice changes.
        """
        queues = _queues(waiting)
        models = self._rates.models()
        self._policies = {key: own for key, own in self._policies.items() if key in models}
        self._demands = {}
        changes = []
        for model in sorted({*models, *(queues if self._config.cold_start_s else ())}):
            workers = self._rates.workers(model)
            queued = self._queued(model, queues.get(model, ()))
            demand = demand_of(workers, queued, target_itl_s=self._config.target_itl_s)
            self._advise(model, workers, queued, demand)
            change = self._policy(model).decide(workers, demand, now)
            if change is not None:
                changes.append(change)
        return changes if self._config.automatic_roles == "on" else []

    async def send(self, change: RoleChange) -> None:
        command = ChangeRoles(roles=(change.role,), min_s=change.min_s)
        source: WorkerRole = "decode" if change.role == "prefill" else "prefill"
        subject, worker_id = lifecycle(source, change.worker_id), change.worker_id
        try:
            await self._requests.request(worker_id, subject, command, Done, base_s=CHANGE_TIMEOUT_S)
        except HearthError as error:
            log.info("role_change_refused", worker=worker_id, reason=error.message)
        else:
            log.info("role_changed", worker=worker_id, role=change.role)

    def _policy(self, model: ModelKey) -> RolePolicy:
        policy = self._policies.get(model)
        if policy is None:
            config = self._config
            policy = self._policies[model] = RolePolicy(
                min_s=config.role_change_min_s, min_workers=config.min_role_workers
            )
        return policy

    def _queued(self, model: ModelKey, tickets: Iterable[QueuedRequest]) -> QueuedWork:
        sizes = [len(each.request.prompt_token_ids) // TOKEN_ID_BYTES for each in tickets]
        block_size = model[2]
        return QueuedWork(
            num_requests=len(sizes),
            num_prompt_tokens=sum(sizes),
            num_blocks=sum(-(-(size + 1) // block_size) for size in sizes),
            uncached_share=self._rates.uncached_share(model),
        )

    def _advise(
        self, model: ModelKey, workers: list[WorkerWork], queued: QueuedWork, demand: WorkerDemand
    ) -> None:
        """Records the advice for a model name, as the sum over its revisions."""
        earlier = self._demands.get(model[0], [None, None])
        self._demands[model[0]] = [
            _sum(before, each)
            for before, each in zip(
                earlier, self._advice(model[0], workers, queued, demand), strict=True
            )
        ]

    def _advice(
        self, name: str, workers: list[WorkerWork], queued: QueuedWork, demand: WorkerDemand
    ) -> Iterator[RoleDemand]:
        split = split_of(workers)
        counts = {"prefill": split.num_prefill, "decode": split.num_decode}
        for role in ROLES:
            waits = queued if demand.waits_for == role else QueuedWork()
            busy = demand.prefill if role == "prefill" else demand.decode
            yield RoleDemand(
                model=name,
                role=role,
                num_queued_requests=waits.num_requests,
                num_queued_tokens=waits.num_prompt_tokens,
                work_s=demand.queued_s if demand.waits_for == role else 0.0,
                num_workers=counts[role] + split.num_both,
                num_wanted_workers=self._num_wanted(busy, queued if not workers else waits),
            )

    def _num_wanted(self, busy: float, waiting: QueuedWork) -> int:
        """Returns at least one where requests wait; without cold starts, at least one anyway."""
        if not self._config.cold_start_s:
            return wanted_workers(busy, self._config.min_role_workers)
        return wanted_workers(busy, min(1, waiting.num_requests))


def _queues(waiting: Iterable[QueuedRequest]) -> dict[ModelKey, list[QueuedRequest]]:
    queues: dict[ModelKey, list[QueuedRequest]] = defaultdict(list)
    for ticket in waiting:
        if not ticket.is_placing or ticket.unservable_since is not None:
            queues[ticket.queue.served].append(ticket)
    return queues


def _sum(before: RoleDemand | None, each: RoleDemand) -> RoleDemand:
    if before is None:
        return each
    return RoleDemand(
        model=each.model,
        role=each.role,
        num_queued_requests=before.num_queued_requests + each.num_queued_requests,
        num_queued_tokens=before.num_queued_tokens + each.num_queued_tokens,
        work_s=before.work_s + each.work_s,
        num_workers=before.num_workers + each.num_workers,
        num_wanted_workers=before.num_wanted_workers + each.num_wanted_workers,
    )
