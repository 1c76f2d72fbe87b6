"""The workers as placement sees them: their heartbeats, plus the assignments made since.

A heartbeat may be a quarter of a second old; without the assignments a burst would go to one
worker. An assignment counts until a heartbeat arrives that includes its load.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from math import inf

from services.scheduler.backlog import ModelKey, QueueKey, model_key
from services.scheduler.placement import ModelWorkers, RequestSize, Target
from services.scheduler.sites.link_budgets import LinkBudgets
from services.scheduler.sites.model_tables import ModelTables
from services.scheduler.throughput import Speed
from services.scheduler.worker_table import MAX_AHEAD_OF_SITE_S, WorkerRow, WorkerTable
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S, Fleet
from shared.messages import Heartbeat, ModelCard, WorkerLoad
from shared.subjects import is_at_site, site_in

# A heartbeat includes an assignment that was confirmed this long before the heartbeat's arrival.
SETTLED_S = 0.05
# The state of a site sums heartbeats of its workers, which are so old in the mean when it leaves.
# What is counted twice keeps the site idle; what is missed waits there for as long.
STATE_AGE_S = HEARTBEAT_INTERVAL_S / 2
NEAREST_EVERY_S = 1.0  # a state of each gateway comes as often


@dataclass(eq=False, slots=True)
class Assignment:
    worker_id: str
    prefill_worker_id: str | None
    num_blocks: int
    num_tokens: int
    num_uncached_tokens: int
    confirmed_at: float | None = None
    link_s: float = 0.0  # of the link to another site that computes the prompt

    @property
    def involved(self) -> tuple[str, ...]:
        prefill = self.prefill_worker_id
        return (self.worker_id,) if prefill is None else (self.worker_id, prefill)

    def count(self, worker: WorkerRow, now: float, sign: int = 1) -> None:
        """Adds this assignment to the estimated load of `worker`; subtracts it if `sign` is -1."""
        share = sign / worker.num_engines
        if self.worker_id == worker.worker_id:
            worker.num_free_blocks -= sign * self.num_blocks
            worker.decode_tokens += share * self.num_tokens
            worker.num_running += share
        if (self.prefill_worker_id or self.worker_id) == worker.worker_id:
            work_s = self.num_uncached_tokens * worker.speed.token_s
            worker.busy_until = max(worker.busy_until, now) + share * work_s


@dataclass(eq=False, slots=True)
class _KnownWorker:
    model: ModelKey
    roles: tuple[str, ...]
    worker: WorkerRow
    assignments: dict[Assignment, None] = field(default_factory=dict)


class WorkerFleet:
    """The live workers by model. Loads are this scheduler's estimates; other schedulers also
    place requests.
    """

    def __init__(
        self,
        fleet: Fleet,
        round_trip_s: Callable[[str], float] = lambda worker_id: 0.0,
        links: LinkBudgets | None = None,
    ) -> None:
        """`round_trip_s` returns the round trip to a worker of another site."""
        self._fleet = fleet
        self._round_trip_s = round_trip_s
        self._links = LinkBudgets() if links is None else links
        self._known: dict[str, _KnownWorker] = {}
        self._models: dict[ModelKey, ModelTables] = {}
        self._pushing: dict[str, set[str]] = {}  # prefill workers of other sites, by site

    def kv_bytes_per_s(self, site: str, now: float) -> float | None:
        """Returns the rate at which another site pushes KV here, if it has been asked to."""
        return self._links.known_bytes_per_s(site, now)

    def knows(self, worker_id: str) -> bool:
        """Whether the worker is live and accepts requests."""
        return worker_id in self._known

    def region_of(self, worker_id: str) -> str:
        """Returns a worker's region, by its credential or its site's link; "": none is known."""
        known = self._known.get(worker_id)
        return "" if known is None else known.worker.region

    def speed(self, worker_id: str) -> Speed:
        known = self._known.get(worker_id)
        return Speed() if known is None else known.worker.speed

    def num_requests(self, worker_id: str) -> int | None:
        """Returns the number of requests of the worker, as far as known, or None unless it is live
        and accepts requests.
        """
        known = self._known.get(worker_id)
        return None if known is None else round(known.worker.num_running) + known.worker.num_waiting

    def serving(self, model: ModelKey) -> ModelWorkers:
        """Returns live workers that serve the model and accept requests, with their estimated
        load.
        """
        workers = self._models.get(model)
        if workers is None:
            return ModelWorkers(WorkerTable(), WorkerTable(), 0.0)
        return ModelWorkers(workers.decodes, workers.prefills, workers.speeds.handoff_overhead_s)

    def serving_elsewhere(self, model: ModelKey) -> ModelWorkers | None:
        """Returns the gateways of other sites that serve the model, or None without any. Their
        sites choose the workers.
        """
        workers = self._models.get(model)
        if workers is None or not len(workers.sites):
            return None
        return ModelWorkers(workers.sites, WorkerTable(), 0.0)

    def nearest_site_s(self, model: ModelKey, now: float) -> float:
        """Returns the round trip to the nearest site that serves the model, of less than a second
        ago: there may be hundreds of gateways.
        """
        workers = self._models.get(model)
        if workers is None:
            return inf
        if now - workers.nearest_at >= NEAREST_EVERY_S:
            workers.nearest_s = min(map(self._round_trip_s, workers.sites.ids), default=inf)
            workers.nearest_at = now
        return workers.nearest_s

    def has_worker(
        self,
        model: ModelKey,
        excluded: Collection[str],
        regions: Collection[str] = (),
        *,
        num_context_tokens: int = 0,
        features: tuple[str, ...] = (),
        is_local: bool = False,
    ) -> bool:
        """Whether any worker with `features` and a context of so many tokens could decode if it had
        room. `is_local`: workers of other sites do not count.
        """
        workers = self._models.get(model)
        if workers is None:
            return False
        tables = (workers.decodes,) if is_local else (workers.decodes, workers.sites)
        return any(
            table.has_any(
                regions, but=excluded, num_context_tokens=num_context_tokens, features=features
            )
            for table in tables
            if len(table)
        )

    def numerics_mismatches(
        self, queue: QueueKey, needs: RequestSize, excluded: Collection[str]
    ) -> list[str]:
        """Returns decode workers that must not resume the request: of other numerics than
        its output, while a worker of equal ones lives that has the features and the context
        for the request.
        """
        workers = self._models.get(queue.served)
        if workers is None or queue.numerics is None:
            return []
        return [
            worker_id
            for table in (workers.decodes, workers.sites)
            for worker_id in table.numerics_mismatches(
                str(queue.numerics),
                needs.num_context_tokens,
                queue.regions,
                but=excluded,
                features=queue.needs,
            )
        ]

    def unfit_for_move(self, queue: QueueKey, needs: RequestSize) -> list[str]:
        """Returns the decode workers, here and at other sites, to which a request does not move:
        that have no room for what it may yet take, or would sample other tokens.
        """
        workers = self._models.get(queue.served)
        if workers is None:
            return []
        numerics = None if queue.numerics is None else str(queue.numerics)
        return [
            worker_id
            for table in (workers.decodes, workers.sites)
            for worker_id in table.unfit_for_move(needs.num_room_tokens, numerics)
        ]

    def smallest_context(self, model: ModelKey, num_tokens: int) -> int:
        """Returns the smallest context of at least `num_tokens` of a live decode worker, or 0."""
        workers = self._models.get(model)
        if workers is None:
            return 0
        here = workers.decodes.smallest_context(num_tokens)
        return here or workers.sites.smallest_context(num_tokens)

    def assign(self, target: Target, needs: RequestSize, now: float) -> Assignment:
        prefill = target.prefill_candidates[0] if target.prefill_candidates else None
        assignment = Assignment(
            worker_id=target.decode_id,
            prefill_worker_id=prefill,
            num_blocks=target.num_blocks,
            num_tokens=needs.num_tokens,
            num_uncached_tokens=target.num_uncached_tokens,
        )
        for known in self._involved(assignment):
            known.assignments[assignment] = None
            assignment.count(known.worker, now)
            self._put(known)
        if prefill in self._known and is_at_site(prefill):
            push_token_s = self._known[prefill].worker.speed.push_token_s
            assignment.link_s = target.num_pushed_tokens * push_token_s
            self._use_link(prefill, assignment.link_s, now)
        return assignment

    def confirm(self, assignment: Assignment, now: float) -> None:
        assignment.confirmed_at = now

    def release(self, assignment: Assignment, now: float) -> None:
        for known in self._involved(assignment):
            if assignment in known.assignments:
                del known.assignments[assignment]
                assignment.count(known.worker, now, -1)
                self._put(known)
        if assignment.prefill_worker_id is not None and assignment.link_s:
            self._use_link(assignment.prefill_worker_id, -assignment.link_s, now)

    def avoid(self, worker_id: str) -> None:
        """Excludes a worker that rejected a request or timed out, until its next heartbeat."""
        known = self._known.get(worker_id)
        if known is not None:
            known.worker.is_avoided = True
            self._put(known)

    def on_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Updates the tables, after the fleet has processed the heartbeat."""
        worker_id = heartbeat.process_id
        if self._fleet.heartbeat_of(worker_id) is not heartbeat:  # old, or above the peer limit
            return
        card, load = heartbeat.model, heartbeat.load
        takes_work = self._fleet.is_live(worker_id) and heartbeat.state == "ready"
        if card is None or load is None or not takes_work:
            self.lost(worker_id)
            return
        model = model_key(card)
        known = self._known.get(worker_id)
        if known is not None and known.model != model:
            self.lost(worker_id)
            known = None
        workers = self._models.get(model)
        pushes = is_at_site(worker_id) and "prefill" in heartbeat.roles
        is_usable = card.kv_bytes_per_token and workers is not None and workers.receives_from_sites
        if pushes and not is_usable:
            self.lost(worker_id)
            return
        if workers is None:
            workers = self._models[model] = ModelTables()
        speed, round_trip_s, age_s = workers.observe(worker_id, load), 0.0, 0.0
        if is_at_site(worker_id):
            round_trip_s = self._round_trip_s(worker_id)
            speed = replace(speed, step_s=speed.step_s + round_trip_s)
            age_s = STATE_AGE_S + round_trip_s / 2
        else:
            self._links.observe(worker_id, load, card, now)
        worker = _worker_of(heartbeat, card, load, speed, now - age_s)
        worker.round_trip_s = round_trip_s
        if pushes:
            self._put_behind_link(worker, model, card, now)
        if known is None:
            known = self._known[worker_id] = _KnownWorker(model, heartbeat.roles, worker)
        known.worker = worker
        if known.roles != heartbeat.roles:
            known.roles = heartbeat.roles
            workers.leave_roles(worker_id)
        # a start is confirmed half a round trip after it, as its state arrives
        settled_s = STATE_AGE_S if is_at_site(worker_id) else SETTLED_S
        known.assignments = _unsettled(known.assignments, now - settled_s)
        for assignment in known.assignments:
            assignment.count(worker, now)
        workers.put(known.roles, worker)

    def lost(self, worker_id: str) -> None:
        known = self._known.pop(worker_id, None)
        if known is not None:
            workers = self._models[known.model]
            workers.remove(worker_id)
            self._links.forget(worker_id)
            self._pushing.get(site_in(worker_id) or "", set()).discard(worker_id)
            if workers.is_empty:
                del self._models[known.model]

    def _put(self, known: _KnownWorker) -> None:
        self._models[known.model].put(known.roles, known.worker)

    def _put_behind_link(
        self, worker: WorkerRow, model: ModelKey, card: ModelCard, now: float
    ) -> None:
        """Makes the row one of a site that pushes KV over its link."""
        site = site_in(worker.worker_id) or ""
        push_token_s = self._links.push_token_s(site, model, card, now)
        worker.speed = replace(worker.speed, push_token_s=push_token_s)
        worker.push_free_at = self._links.free_at(site)
        worker.max_ahead_s = MAX_AHEAD_OF_SITE_S
        self._pushing.setdefault(site, set()).add(worker.worker_id)

    def _use_link(self, worker_id: str, seconds: float, now: float) -> None:
        """Counts a push on the link of a worker's site, for all that it may push."""
        site = site_in(worker_id) or ""
        self._links.assign(site, seconds, now)
        for each in self._pushing.get(site, ()):
            known = self._known[each]
            known.worker.push_free_at = self._links.free_at(site)
            self._put(known)

    def _involved(self, assignment: Assignment) -> list[_KnownWorker]:
        found = (self._known.get(worker_id) for worker_id in assignment.involved)
        return [known for known in found if known is not None]


def _worker_of(
    heartbeat: Heartbeat, card: ModelCard, load: WorkerLoad, speed: Speed, seen_at: float
) -> WorkerRow:
    """`seen_at` is when the load was such."""
    return WorkerRow(
        worker_id=heartbeat.process_id,
        kv_format=f"{card.kv_format} {card.numerics.kv_key}",
        block_size=card.block_size,
        num_engines=load.num_engines,
        num_free_blocks=load.num_free_blocks,
        num_total_blocks=load.num_total_blocks,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        busy_until=seen_at + load.prefill_tokens_in_flight * speed.token_s,
        decode_tokens=load.decode_tokens_in_flight,
        region=heartbeat.region,
        speed=speed,
        max_context_tokens=card.max_context_tokens,
        numerics=str(card.numerics),
        features=frozenset(card.features),
        also_decodes="decode" in heartbeat.roles and not is_at_site(heartbeat.process_id),
    )


def _unsettled(assignments: dict[Assignment, None], settled_at: float) -> dict[Assignment, None]:
    return {
        each: None
        for each in assignments
        if each.confirmed_at is None or each.confirmed_at > settled_at
    }
