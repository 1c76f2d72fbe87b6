"""One site on the virtual clock: the scheduler's own queue, fleet and placement, and workers that
are formulas (`benchmarks/simulate/sites.py`). Only the bus and the links are delays.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from benchmarks.simulate.simulation import CARD, HEARTBEAT_S, SERVED, TICK_S, submission_of
from benchmarks.simulate.sites import Costs, Decode, Job, Later, Prefill
from benchmarks.simulate.trace import TraceRequest
from services.gateway.sites.site_requests import MAX_NAME
from services.scheduler.backlog import QueuedRequest, QueueKey
from services.scheduler.blocked_queues import BlockedQueues
from services.scheduler.fleet import Assignment, WorkerFleet
from services.scheduler.placement import (
    LocalPrefill,
    ModelWorkers,
    RequestSize,
    Target,
    leaves_home,
    place,
    prompt_s,
)
from services.scheduler.request_queues import RequestQueues
from services.scheduler.service import MIN_CLOSED_S
from shared.errors import Overloaded
from shared.lifecycle.health import Fleet
from shared.messages import (
    Heartbeat,
    RoleDemand,
    SchedulerLoad,
    SiteModels,
    SiteState,
    StartDecode,
    SubmitRequest,
)
from shared.packing import TOKEN_ID_BYTES
from shared.sites.site_states import COUNTERS_EVERY, models_id, site_models
from shared.subjects import at_site, gateway_at_site, site_in
from shared.transport.round_trips import RoundTrips

MAX_TOKENS_QUEUED = 200_000_000
DEADLINE_S = 3600.0
LOCAL_PREFILL = LocalPrefill(always=4, at_most=1_000_000)
PLACEMENT_ID = bytes(16)


@dataclass
class Outcome:
    ttft_s: array = field(default_factory=lambda: array("d"))
    tpot_s: array = field(default_factory=lambda: array("d"))
    home_ns: array = field(default_factory=lambda: array("q"))  # time of decisions, by where
    link_ns: array = field(default_factory=lambda: array("q"))
    num_refused: Counter[str] = field(default_factory=Counter)  # by the site that refused


@dataclass(slots=True)
class Arrival:
    """A request at its own site, or the same one at the site that serves it for another."""

    trace: TraceRequest
    arrived_at: float
    regions: tuple[str, ...]
    on_end: Callable[[Job, float], None]


class VirtualSite:
    def __init__(
        self,
        name: str,
        region: str,
        *,
        num_workers: int,
        costs: Costs,
        later: Later,
        random_below: Callable[[int], int],
        outcome: Outcome,
        max_queued_requests: int,
    ) -> None:
        self.name, self.region = name, region
        self.round_trips = RoundTrips()
        self._later, self._random_below, self._outcome = later, random_below, outcome
        self._health, self._gateways = Fleet("scheduler"), Fleet("gateway")
        self._workers = WorkerFleet(self._health, self.round_trips.mean_s)
        self._queues = RequestQueues(max_queued_requests, MAX_TOKENS_QUEUED)
        self._arrivals: dict[QueuedRequest, Arrival] = {}
        self._blocked, self._opening = BlockedQueues(), set[QueueKey]()
        self._deciding_ns = self._num_names = self._num_states = self._num_beats = 0
        self._jobs: dict[Job, Arrival] = {}
        # sends StartDecode to a site, with what to do if it refuses
        self.send: Callable[[str, StartDecode, Arrival, Callable[[float, bool], None]], None]
        self.decodes: dict[str, Decode] = {}
        self.prefills: dict[str, Prefill] = {}
        for number in range(num_workers - num_workers // 2):
            decode = Decode(f"decode-{number}", costs, later, lambda _: None)
            decode.on_end = self._ended
            self.decodes[decode.worker_id] = decode
        for number in range(num_workers // 2):
            prefill = Prefill(f"prefill-{number}", costs, later, lambda _: None)
            self.prefills[prefill.worker_id] = prefill
        for engine in (*self.decodes.values(), *self.prefills.values()):
            later(HEARTBEAT_S * random_below(1000) / 1000, self._beat, engine)
        later(HEARTBEAT_S, self._beat_scheduler, None)
        later(TICK_S, self._tick, None)

    # ── what it sends and receives ───────────────────────────────────────────────────────────────

    def states(self, gateways: tuple[str, ...]) -> list[tuple[SiteState, SiteModels]]:
        """Returns the next state of each gateway, and the models that it reports."""
        self._num_states += 1
        found = site_models(self._gateways)
        models = tuple(each.model for each in found)
        digest, has_counters = models_id(models), self._num_states % COUNTERS_EVERY == 1
        return [
            (
                SiteState(
                    gateway_id=at_site(self.name, each),
                    epoch=2**63,
                    sequence_number=self._num_states,
                    region=self.region,
                    models_id=digest,
                    loads=tuple(each.load for each in found),
                    counters=tuple(each.counters for each in found) if has_counters else (),
                ),
                SiteModels(gateway_id=at_site(self.name, each), models_id=digest, models=models),
            )
            for each in gateways
        ]

    def take_states(self, now: float, heartbeats: list[Heartbeat]) -> None:
        for each in heartbeats:
            self._health.observe(each, now)
            self._workers.on_heartbeat(each, now)

    def _beat(self, now: float, engine: Decode | Prefill) -> None:
        heartbeat = Heartbeat(
            process_id=engine.worker_id,
            epoch=1,
            sequence_number=engine.step + 1,
            roles=("decode",) if isinstance(engine, Decode) else ("prefill",),
            state="ready",
            interval_s=HEARTBEAT_S,
            region=self.region,
            load=engine.load(now),
            model=CARD,
        )
        self._gateways.observe(heartbeat, now)
        self._health.observe(heartbeat, now)
        self._workers.on_heartbeat(heartbeat, now)
        self._later(HEARTBEAT_S, self._beat, engine)
        self._blocked.on_heartbeat(heartbeat)
        self._dispatch(now)

    def _beat_scheduler(self, now: float, _: object) -> None:
        self._num_beats += 1
        waiting = self._queues.held()
        demand = RoleDemand(
            model=CARD.name,
            role="prefill",
            num_queued_requests=len(waiting),
            num_queued_tokens=sum(self._arrivals[each].trace.input_length for each in waiting),
        )
        heartbeat = Heartbeat(
            process_id="scheduler",
            epoch=1,
            sequence_number=self._num_beats,
            roles=("scheduler",),
            state="ready",
            interval_s=HEARTBEAT_S,
            scheduler=SchedulerLoad(demands=(demand,)),
        )
        self._gateways.observe(heartbeat, now)
        self._later(HEARTBEAT_S, self._beat_scheduler, None)

    def _tick(self, now: float, _: object) -> None:
        self._later(TICK_S, self._tick, None)
        for queue in self._blocked.all():
            self._probe(now, queue)

    def _probe(self, now: float, queue: QueueKey) -> None:
        self._opening.discard(queue)
        if self._blocked.allow_probe(queue):
            self._dispatch(now)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def submit(self, now: float, arrival: Arrival) -> None:
        """Takes a request of this site's own."""
        self._num_names += 1
        submit = submission_of(arrival.trace, f"r{self._num_names}", DEADLINE_S)
        request = msgspec.structs.replace(submit.request, allowed_regions=arrival.regions)
        self._enqueue(now, msgspec.structs.replace(submit, request=request), arrival)

    def serve(self, now: float, command: StartDecode, arrival: Arrival) -> bool:
        """Takes a request of another site. Returns whether there is room in the queue."""
        self._num_names += 1
        asked = command.request
        origin = site_in(asked.gateway_id) or ""
        request = msgspec.structs.replace(
            asked,
            request_id=f"{origin}/r{self._num_names}",
            tenant_id=at_site(origin, asked.tenant_id)[:MAX_NAME],
            gateway_id="gateway-0",
            origin_site=origin,
        )
        return self._enqueue(now, SubmitRequest(request=request), arrival)

    def _enqueue(self, now: float, submit: SubmitRequest, arrival: Arrival) -> bool:
        began = time.thread_time_ns()
        try:
            ticket = self._queues.enqueue(submit, now)
        except Overloaded:
            self._outcome.num_refused[self.name] += 1
            return False
        self._deciding_ns += time.thread_time_ns() - began
        self._arrivals[ticket] = arrival
        self._dispatch(now)
        return True

    def _dispatch(self, now: float) -> None:
        """Places queued requests, until those that are first have no room."""
        while True:
            began = time.thread_time_ns()
            ticket = self._queues.pop(now, self._blocked.closed())
            self._deciding_ns += time.thread_time_ns() - began
            if ticket is None:
                return
            self._blocked.take(ticket.queue)
            self._place(ticket, now)

    def _place(self, ticket: QueuedRequest, now: float) -> None:
        tried: set[str] = set()
        while True:
            began = time.thread_time_ns()
            needs = _needs_of(ticket)
            target = self._target(ticket, needs, now, tried)
            if target is None:
                self._block(ticket, needs, now)
                self._deciding_ns += time.thread_time_ns() - began
                return
            assignment = self._workers.assign(target, needs, now)
            self._deciding_ns += time.thread_time_ns() - began
            tried.add(target.decode_id)
            if self._start(ticket, target, assignment, now):
                return

    def _block(self, ticket: QueuedRequest, needs: RequestSize, now: float) -> None:
        queue = ticket.queue
        decodes = self._workers.serving(queue.served).decodes
        opens_in_s = decodes.opens_at(queue.regions, queue.needs) - now
        if -MIN_CLOSED_S < opens_in_s < TICK_S and queue not in self._opening:
            self._opening.add(queue)
            self._later(max(opens_in_s, MIN_CLOSED_S), self._probe, queue)
        self._blocked.block(queue, needs)
        self._queues.requeue(ticket, now)

    def _target(
        self, ticket: QueuedRequest, needs: RequestSize, now: float, tried: set[str]
    ) -> Target | None:
        """Returns the best target, as the scheduler's service chooses it."""
        target = self._find(needs, self._workers.serving(SERVED), now, tried)
        if target is not None or ticket.request.origin_site:
            return target
        elsewhere = self._workers.serving_elsewhere(SERVED)
        if elsewhere is None:
            return None
        may_leave = leaves_home(
            now - ticket.queued_at,
            self._workers.nearest_site_s(SERVED, now),
            prompt_s(self._workers.serving(SERVED), needs.num_tokens),
            is_served_here=self._workers.has_worker(
                SERVED, (), ticket.queue.regions, is_local=True
            ),
        )
        found = self._find(needs, elsewhere, now, tried) if may_leave else None
        if found is not None:
            self._blocked.allow_probe(ticket.queue)
        return found

    def _find(
        self, needs: RequestSize, workers: ModelWorkers, now: float, tried: set[str]
    ) -> Target | None:
        return place(
            needs,
            workers,
            {},
            local_prefill=LOCAL_PREFILL,
            now=now,
            random_below=self._random_below,
            excluded=tried,
        )

    def _start(
        self, ticket: QueuedRequest, target: Target, assignment: Assignment, now: float
    ) -> bool:
        """Returns whether the worker takes the request; a site's reply comes later."""
        arrival = self._arrivals[ticket]
        if site_in(target.decode_id) is not None:
            owner = at_site(self.name, ticket.request.gateway_id)
            request = msgspec.structs.replace(ticket.request, gateway_id=owner)
            command = StartDecode(placement_id=PLACEMENT_ID, request=request)
            decided_ns, self._deciding_ns = self._deciding_ns, 0

            def replied(at: float, is_taken: bool) -> None:
                if is_taken:
                    self._outcome.link_ns.append(decided_ns)
                    self._placed(ticket, assignment, at)
                else:
                    self._set_aside(target, assignment, at)
                    self._queues.requeue(ticket, at)
                    self._dispatch(at)

            self.send(gateway_at_site(target.decode_id), command, arrival, replied)
            return True
        engine = self.decodes[target.decode_id]
        job = Job(arrival.trace, arrival.arrived_at, engine)
        if target.prefill_candidates:
            job.prefill = self.prefills[target.prefill_candidates[0]]
        if not engine.accept(now, job):
            self._set_aside(target, assignment, now)
            return False
        self._jobs[job] = arrival
        self._placed(ticket, assignment, now)
        self._outcome.home_ns.append(self._deciding_ns)
        self._deciding_ns = 0
        return True

    def _placed(self, ticket: QueuedRequest, assignment: Assignment, now: float) -> None:
        began = time.thread_time_ns()
        self._workers.confirm(assignment, now)
        self._queues.placed(ticket, now)
        self._blocked.unblock(ticket.queue)
        self._deciding_ns += time.thread_time_ns() - began
        del self._arrivals[ticket]

    def _set_aside(self, target: Target, assignment: Assignment, now: float) -> None:
        self._workers.release(assignment, now)
        self._workers.avoid(target.decode_id)

    def _ended(self, now: float, job: Job) -> None:
        self._jobs.pop(job).on_end(job, now)


def _needs_of(ticket: QueuedRequest) -> RequestSize:
    request = ticket.request
    num_tokens = len(request.prompt_token_ids) // TOKEN_ID_BYTES
    return RequestSize(num_tokens, num_tokens, allowed_regions=request.allowed_regions)
