"""A fleet on a virtual clock, with the scheduler's and the index's own code.

`RequestQueues`, `WorkerFleet`, `place` and `PrefixIndex` are the real ones, called in the same
order as by the services; only the bus, the engines and the KV link are replaced, by delays.
Heartbeats arrive every 250 ms and cache events 50 ms after a change, as from a worker.
"""

from __future__ import annotations

import heapq
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

from benchmarks.simulate.policies import Asked, Policy
from benchmarks.simulate.sites import (
    KV_FORMAT,
    MODEL,
    REVISION,
    Costs,
    Decode,
    Job,
    Prefill,
    Site,
    hash_of,
)
from benchmarks.simulate.trace import BLOCK_TOKENS, TraceRequest
from services.kv_index.index import PrefixIndex
from services.scheduler.backlog import QueuedRequest
from services.scheduler.fleet import WorkerFleet
from services.scheduler.placement import RequestSize
from services.scheduler.request_queues import RequestQueues
from shared.errors import Overloaded
from shared.lifecycle.health import Fleet
from shared.messages import (
    BlockPage,
    Choice,
    Heartbeat,
    Request,
    SamplingParams,
    SubmitRequest,
)
from shared.packing import TOKEN_ID_BYTES
from tests.support.records import model_card

HEARTBEAT_S = 0.25
TICK_S = 0.1  # interval at which the scheduler searches for requests past their deadline
FLOODER = "flooder"
MAX_TOKENS_QUEUED = 200_000_000
CARD = model_card(
    name=MODEL,
    revision=REVISION,
    kv_format=KV_FORMAT,
    block_size=BLOCK_TOKENS,
    max_context_tokens=2**20,
    vocab_size=32_000,
)
SERVED = (MODEL, REVISION, BLOCK_TOKENS)
_CHOICES = (Choice(choice_index=0),)


@dataclass(frozen=True, slots=True)
class FleetShape:
    num_prefill: int
    num_decode: int
    costs: Costs = field(default_factory=Costs)
    max_queued_requests: int = 1024
    deadline_s: float = 3600.0  # deadline of each request
    spread_of_speed: float = 1.0  # sites are up to this factor faster or slower

    def drawn_costs(self, draw: Random) -> Costs:
        if self.spread_of_speed == 1.0:
            return self.costs
        factor = self.spread_of_speed ** draw.uniform(-1.0, 1.0)
        return replace(
            self.costs,
            prefill_step_s=self.costs.prefill_step_s * factor,
            prefill_token_s=self.costs.prefill_token_s * factor,
            decode_step_s=self.costs.decode_step_s * factor,
        )


@dataclass
class Outcome:
    """The arrival of each ended request, its seconds to the first token, and those per later
    token.
    """

    arrived_at: array = field(default_factory=lambda: array("d"))
    ttft_s: array = field(default_factory=lambda: array("d"))
    tpot_s: array = field(default_factory=lambda: array("d"))
    is_normal: array = field(default_factory=lambda: array("b"))
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_local: int = 0
    num_refused: Counter[str] = field(default_factory=Counter)  # key: tenant
    num_expired: Counter[str] = field(default_factory=Counter)
    decision_ns: array = field(default_factory=lambda: array("q"))  # time of each placement
    num_heartbeats: int = 0
    hearing_ns: int = 0
    ended_at: float = 0.0


class Simulation:
    def __init__(self, shape: FleetShape, policy: Policy, *, seed: int = 0) -> None:
        self.outcome = Outcome()
        self._policy = policy
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], object]] = []
        self._order = count()
        self._health = Fleet("scheduler-1")
        self._workers = WorkerFleet(self._health)
        self._deadline_s = shape.deadline_s
        self._queues = RequestQueues(shape.max_queued_requests, MAX_TOKENS_QUEUED)
        self._index = PrefixIndex()
        self._sites: dict[str, Site] = {}
        self._names = count()
        self._traces: dict[QueuedRequest, TraceRequest] = {}
        self._is_blocked = False
        self._deciding_ns = 0  # time of decisions since the last placement
        self._open = 0  # requests that arrived and have not ended
        self._has_arrivals = True
        self._random = Random(seed)
        self._build(shape)

    def run(self, requests: Iterable[TraceRequest]) -> Outcome:
        self._next_arrival(iter(requests))
        self._tick(self._now, None)
        events = self._events
        while events and (self._has_arrivals or self._open):
            self._now, _, act, argument = heapq.heappop(events)
            act(self._now, argument)
        self.outcome.ended_at = self._now
        return self.outcome

    # ── the fleet ────────────────────────────────────────────────────────────────────────────────

    def _build(self, shape: FleetShape) -> None:
        for number in range(shape.num_prefill):
            costs = shape.drawn_costs(self._random)
            self._join(Prefill(f"prefill-{number}", costs, self._later, self._index.apply))
        for number in range(shape.num_decode):
            costs = shape.drawn_costs(self._random)
            site = Decode(f"decode-{number}", costs, self._later, self._index.apply)
            site.on_end = self._ended
            self._join(site)

    def _join(self, site: Decode | Prefill) -> None:
        self._sites[site.worker_id] = site
        self._index.add_worker(site.worker_id, MODEL, REVISION, KV_FORMAT)
        self._index.begin_resync(site.worker_id)
        self._index.add_page(
            BlockPage(
                worker_id=site.worker_id,
                epoch=1,
                sequence_number=0,
                model=MODEL,
                revision=REVISION,
                kv_format=KV_FORMAT,
                stored=(),
            )
        )
        self._index.finish_resync(site.worker_id)
        self._beat(0.0, site, is_first=True)

    def _beat(self, now: float, site: Decode | Prefill, *, is_first: bool = False) -> None:
        heartbeat = Heartbeat(
            process_id=site.worker_id,
            epoch=1,
            sequence_number=site.step + 1,
            roles=("decode",) if isinstance(site, Decode) else ("prefill",),
            state="ready",
            interval_s=HEARTBEAT_S,
            load=site.load(now),
            model=CARD,
        )
        began = time.perf_counter_ns()
        self._health.observe(heartbeat, now)
        self._workers.on_heartbeat(heartbeat, now)
        self.outcome.hearing_ns += time.perf_counter_ns() - began
        self.outcome.num_heartbeats += 1
        wait_s = self._random.random() * HEARTBEAT_S if is_first else HEARTBEAT_S
        self._later(wait_s, self._beat, site)
        if self._is_blocked:
            self._is_blocked = False
            self._dispatch()

    def _later(self, delay_s: float, act: Callable[..., None], argument: object) -> None:
        at = self._now + delay_s
        heapq.heappush(self._events, (at, next(self._order), act, argument))

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def _next_arrival(self, requests: Iterator[TraceRequest]) -> None:
        request = next(requests, None)
        if request is None:
            self._has_arrivals = False
            return

        def arrive(now: float, trace: TraceRequest) -> None:
            self._submit(trace, now)
            self._next_arrival(requests)

        self._later(request.at_s - self._now, arrive, request)

    def _submit(self, trace: TraceRequest, now: float) -> None:
        submit = submission_of(trace, f"r{next(self._names)}", self._deadline_s)
        began = time.perf_counter_ns()
        try:
            ticket = self._queues.enqueue(submit, now)
        except Overloaded:
            self.outcome.num_refused[trace.tenant] += 1
            return
        finally:
            self._deciding_ns += time.perf_counter_ns() - began
        self._traces[ticket] = trace
        self._open += 1
        if not self._is_blocked:
            self._dispatch()

    def _tick(self, now: float, _: object) -> None:
        for ticket in self._queues.remove_expired(now):
            self.outcome.num_expired[self._traces.pop(ticket).tenant] += 1
            self._open -= 1
        self._later(TICK_S, self._tick, None)

    def _dispatch(self) -> None:
        """Places queued requests. If the first cannot be placed, the next heartbeat retries."""
        while not self._is_blocked:
            began = time.perf_counter_ns()
            ticket = self._queues.pop(self._now)
            self._deciding_ns += time.perf_counter_ns() - began
            if ticket is None:
                return
            self._place(ticket)

    def _place(self, ticket: QueuedRequest) -> None:
        num_cached_blocks = self._match(ticket)
        tried: set[str] = set()
        while True:
            began = time.perf_counter_ns()
            needs = needs_of(ticket)
            workers = self._workers.serving(SERVED)
            asked = Asked(needs, workers, num_cached_blocks, tried, self._now)
            target = self._policy.choose(asked)
            if target is None:
                self._queues.requeue(ticket, self._now)
                self._is_blocked = True
                self._deciding_ns += time.perf_counter_ns() - began
                return
            assignment = self._workers.assign(target, needs, self._now)
            self._deciding_ns += time.perf_counter_ns() - began
            decode = self._sites[target.decode_id]
            assert isinstance(decode, Decode)
            job = Job(self._traces[ticket], ticket.queued_at, decode)
            if target.prefill_candidates:
                prefill = self._sites[target.prefill_candidates[0]]
                assert isinstance(prefill, Prefill)
                job.prefill = prefill
            if decode.accept(self._now, job):
                began = time.perf_counter_ns()
                self._workers.confirm(assignment, self._now)
                self._queues.placed(ticket, self._now)
                self._deciding_ns += time.perf_counter_ns() - began
                del self._traces[ticket]
                self.outcome.decision_ns.append(self._deciding_ns)
                self._deciding_ns = 0
                return
            self._workers.release(assignment, self._now)
            self._workers.avoid(target.decode_id)
            tried.add(target.decode_id)

    def _match(self, ticket: QueuedRequest) -> dict[str, int]:
        if not self._policy.asks_index:
            return {}
        hashes = [hash_of(each) for each in self._traces[ticket].hash_ids]
        matches = self._index.match(hashes, MODEL, REVISION).matches
        return {each.worker_id: each.num_blocks for each in matches}

    def _ended(self, now: float, job: Job) -> None:
        self._open -= 1
        outcome, trace = self.outcome, job.trace
        outcome.arrived_at.append(job.submitted_at)
        outcome.ttft_s.append(job.first_token_at - job.submitted_at)
        num_later = max(1, trace.output_length - 1)
        outcome.tpot_s.append(max(0.0, now - job.first_token_at) / num_later)
        outcome.is_normal.append(trace.tenant != FLOODER)
        outcome.num_prompt_tokens += trace.input_length
        outcome.num_computed_tokens += job.num_computed_tokens + 1  # decode computes the last one
        outcome.num_local += job.prefill is None


def submission_of(trace: TraceRequest, name: str, deadline_s: float) -> SubmitRequest:
    request = Request(
        request_id=name,
        tenant_id=trace.tenant,
        gateway_id="gateway-1",
        model=MODEL,
        revision=REVISION,
        cache_root=bytes(16),
        prompt_token_ids=bytes(TOKEN_ID_BYTES * trace.input_length),
        block_hashes=b"",
        sampling=SamplingParams(seed=1, max_tokens=trace.output_length),
        choices=_CHOICES,
        deadline_s=deadline_s,
        block_size=BLOCK_TOKENS,
    )
    return SubmitRequest(request=request, affinity_key=trace.session)


def needs_of(ticket: QueuedRequest) -> RequestSize:
    request = ticket.request
    num_tokens = len(request.prompt_token_ids) // TOKEN_ID_BYTES
    return RequestSize(num_tokens, num_tokens, affinity_key=ticket.submit.affinity_key)
