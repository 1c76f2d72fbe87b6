"""The scheduler process: queues requests, queries the index, starts them on decode workers.

submit ──▶ queue ──▶ match prefix ──▶ plan ──▶ StartDecode ──ack──▶ Placed, forgotten
             ▲                         │  ▲          └─ busy, timeout, lost: next worker, new id
             └── no room: until the ───┘  └─ no worker serves the model, or none with what the
                 next heartbeat              request needs: waits, for a host or a short grace

This file decides which request is tried, and when; `placement.py` where; `decode_starts.py` sends
one StartDecode and takes its reply, also a late one; `residency/` has models woken.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from functools import partial

import msgspec
import structlog

from services.scheduler.backlog import QueuedRequest, QueueKey, model_key
from services.scheduler.blocked_queues import BlockedQueues
from services.scheduler.candidates import Candidates, size_of
from services.scheduler.compiled_loops import use_compiled_loops
from services.scheduler.decode_starts import DecodeStarts
from services.scheduler.fleet import WorkerFleet
from services.scheduler.other_sites import OtherSites
from services.scheduler.placement import LocalPrefill, RequestSize, Target, place
from services.scheduler.request_queues import RequestQueues, num_context_tokens
from services.scheduler.residency.keeper import ResidencyKeeper
from services.scheduler.residency.policies import policy_of
from services.scheduler.roles.role_changes import RoleChanges
from services.scheduler.waiting_for_host import NO_WORKER_GRACE_S, UnservedRequests
from shared import subjects
from shared.background import Background, failing_alone, is_logged
from shared.clock import Clock, MonotonicClock
from shared.config import SchedulerConfig, check
from shared.errors import (
    DeadlineExceeded,
    DependencyUnavailable,
    HearthError,
    NoCapacity,
    Overloaded,
    WorkerBusy,
)
from shared.lifecycle.health import Loss
from shared.lifecycle.heartbeat import HealthMonitor, Loads
from shared.lifecycle.identity import connect
from shared.messages import (
    AbortRequest,
    CancelQueued,
    Heartbeat,
    LinkLoad,
    MatchPrefix,
    Message,
    Placed,
    PlacementFailed,
    PrefixMatches,
    Queued,
    QueueKeepalive,
    Request,
    SchedulerLoad,
    SubmitRequest,
)
from shared.metrics.process_report import ProcessReport
from shared.randomness import Randomness, SystemRandomness
from shared.sites.linked_sites import LinkedSites
from shared.tenancy.residency import within_class
from shared.transport.bus import Bus, Unsubscribe, failure_of

log = structlog.get_logger(__name__)

MATCH_TIMEOUT_S = 0.02  # each and the round trip
KEEPALIVE_S = 0.5
TICK_S = 0.1
ROLES_S = 0.25  # interval of decisions about roles
MIN_CLOSED_S = 0.002  # a queue is not retried sooner
DRAIN_S = 5.0
MAX_PLACING = 32


class SchedulerService:
    def __init__(
        self,
        config: SchedulerConfig,
        bus: Bus,
        clock: Clock,
        randomness: Randomness,
        *,
        on_first_worker: Callable[[], Coroutine[object, object, None]] | None = None,
    ) -> None:
        self._on_first_worker = on_first_worker
        self._linked = LinkedSites(bus, clock, config.site) if config.site else None
        self.health_monitor = HealthMonitor(
            bus,
            clock,
            randomness,
            roles=("scheduler",),
            reads_models=True,
            region=config.region,
            loads=Loads(scheduler=self._load, links=self._link_loads),
        )
        self._requests = self.health_monitor.requests
        self._config = config
        self._bus = bus
        self._clock = clock
        self._randomness = randomness
        self._leaving: deque[QueuedRequest] = deque()  # home is full: they are next
        self._queues = RequestQueues(config.max_queued_requests, config.max_queued_tokens)
        self._workers = WorkerFleet(
            self.health_monitor.fleet, self.health_monitor.requests.round_trips.mean_s
        )
        self._role_changes = RoleChanges(config, self._workers, self._requests)
        self._local_prefill = LocalPrefill(
            always=config.local_prefill_tokens, at_most=config.max_local_prefill_tokens
        )
        self._starts = DecodeStarts(
            self.health_monitor.requests,
            self._workers,
            clock,
            randomness,
            on_late=self._started_late,
            abandon=self._abandon,
            refusals=self.health_monitor.refusals,
            site=config.site,
        )
        self._candidates = Candidates(self._workers, self._starts)
        self._sites = OtherSites(
            bus,
            clock,
            self._workers,
            self.health_monitor.refusals,
            region_of=(lambda _: None) if self._linked is None else self._linked.region_of,
        )
        self._blocked = BlockedQueues()
        self._opening: set[QueueKey] = set()  # queues with a scheduled probe
        self._wake = asyncio.Event()
        self._background = Background()
        self._residency = ResidencyKeeper(
            self._requests,
            policy_of(config),
            clock,
            num_running=self._workers.num_requests,
            start=self._background.start_item,
        )
        self._unserved = UnservedRequests(
            self._candidates,
            self._residency,
            requeue=self._requeue,
            fail=self._fail,
            cold_start_s=config.cold_start_s,
        )
        self._placing: set[asyncio.Task[None]] = set()
        self._sending: set[asyncio.Task[None]] = set()
        self._leave: list[Unsubscribe] = []  # unsubscribes from new requests
        self._is_draining = False

    # ── lifecycle ────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        self.health_monitor.on_lost(self._peer_lost)
        self.health_monitor.on_heartbeat(self._on_heartbeat)
        await self.health_monitor.start()
        if self._linked is not None:
            await self._linked.start(self.health_monitor)
            await self._sites.start()
        own_cancel = subjects.cancel(self._bus.process_id)
        await self._bus.subscribe(own_cancel, CancelQueued, self._cancel)
        own_submit = subjects.submit_to(self._bus.process_id)
        for subject, group in ((subjects.SUBMIT, subjects.SCHEDULER_GROUP), (own_submit, "")):
            leave = await self._bus.serve(subject, SubmitRequest, self._submit, queue=group)
            self._leave.append(leave)
        for loop in (self._dispatch(), self._tick(), self._keep_alive(), self._change_roles()):
            self._background.start_own(loop)
        await self.health_monitor.transition_to("ready")

    async def drain(self) -> None:
        """Places queued requests for DRAIN_S; the remaining ones go back to their gateways."""
        self._is_draining = True
        for leave in self._leave:
            await leave()
        await self.health_monitor.transition_to("draining")
        give_up_at = self._clock.now() + DRAIN_S
        while len(self._queues) and self._clock.now() < give_up_at:
            await self._clock.sleep(TICK_S)
        for ticket in self._queues.held():
            self._fail(ticket, NoCapacity("this scheduler is draining", retry_after_s=0.0))
        await asyncio.gather(*self._placing, *self._sending)

    async def stop(self) -> None:
        await self._sites.stop()
        await self._background.stop()
        if self._linked is not None:
            await self._linked.stop()
        await self.health_monitor.stop()
        await self._bus.close()

    def report(self) -> ProcessReport:
        return self.health_monitor.report()

    def _load(self) -> SchedulerLoad:
        return msgspec.structs.replace(
            self._role_changes.load(),
            num_queued_requests=len(self._queues),
            oldest_wait_s=self._queues.oldest_wait_s(self._clock.now()),
        )

    def _link_loads(self) -> tuple[LinkLoad, ...]:
        if self._linked is None:
            return ()
        rate, now = self._workers.kv_bytes_per_s, self._clock.now()
        return tuple(
            msgspec.structs.replace(each, kv_bytes_per_s=rate(each.site, now))
            for each in self._linked.loads()
        )

    # ── incoming messages ────────────────────────────────────────────────────────────────────────

    def _submit(self, message: SubmitRequest) -> Queued:
        if self._is_draining:
            raise WorkerBusy("this scheduler is draining")
        num_ahead = len(self._queues)
        request = within_class(message.request, self._bus.regions.classes)
        if request is not message.request:
            message = msgspec.structs.replace(message, request=request)
        self.health_monitor.refusals.require("scheduler", request)
        context_tokens = self._workers.smallest_context(
            QueueKey.of(request).served, num_context_tokens(request)
        )
        ticket = self._enqueue(message, context_tokens)
        if not message.is_move:
            self._residency.arrived(ticket)
        if not self._wake.is_set():  # sends the index query together with this reply
            self._place_next()
        self._wake.set()  # the queue, not arrival, orders concurrent requests
        return Queued(scheduler_id=self._bus.process_id, num_ahead=num_ahead)

    def _enqueue(self, message: SubmitRequest, context_tokens: int) -> QueuedRequest:
        """Queues a request, or starts to place it at another site if home is full. Raises the
        error that rejects it.
        """
        enqueue = partial(self._queues.enqueue, message, context_tokens=context_tokens)
        now = self._clock.now()
        try:
            ticket = enqueue(now)
            if ticket.is_queueable or ticket.queue not in self._blocked:
                return ticket
            error = self._queues.busy(ticket.queue)
        except Overloaded as full:
            ticket, error = enqueue(now, is_bounded=False), full
        if len(self._leaving) < MAX_PLACING and self._leave_home(ticket, now):
            return ticket
        self._queues.remove(message.request.request_id)
        raise error

    def _leave_home(self, ticket: QueuedRequest, now: float) -> bool:
        """Places a request that may not wait at home next, at another site. Returns False if none
        has room for it.
        """
        ticket.is_leaving = True
        if self._target_elsewhere(ticket, self._excluded(ticket, now), now) is None:
            return False
        self._queues.take(ticket, now)
        self._leaving.append(ticket)
        self._wake.set()
        return True

    def _cancel(self, message: CancelQueued) -> None:
        self._queues.cancel(message)

    def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        now, was_known = self._clock.now(), self._workers.knows(heartbeat.process_id)
        self._workers.on_heartbeat(heartbeat, now)
        self._sites.seen(heartbeat.process_id)
        if not subjects.is_at_site(heartbeat.process_id):
            self._role_changes.on_heartbeat(heartbeat, now)
            self._residency.on_heartbeat(heartbeat)
            self._blocked.on_heartbeat(heartbeat)  # other sites are tried with each tick
        if heartbeat.model is None or heartbeat.load is None:  # the sender is no worker
            return
        if self._on_first_worker is not None:
            self._background.start_item(self._on_first_worker(), is_logged)
            self._on_first_worker = None
        if not was_known:  # another one may serve them; changes of one wait for the tick
            self._unserved.retry(now, served=model_key(heartbeat.model))
        self._wake.set()

    def _peer_lost(self, process_id: str, loss: Loss) -> None:
        self._workers.lost(process_id)
        self._role_changes.lost(process_id)
        self._residency.lost(process_id)
        self._starts.lost(process_id)
        self._sites.lost(process_id, loss)
        if loss is Loss.DOUBLED:  # one of the two gateways still waits for its requests
            return
        dropped = self._queues.remove_of_gateway(process_id)
        if dropped:
            log.warning("gateway_lost", gateway=process_id, num_requests=len(dropped))

    # ── loops ────────────────────────────────────────────────────────────────────────────────────

    async def _dispatch(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._place_next()

    def _place_next(self) -> None:
        """Starts placing requests, at most MAX_PLACING at once."""
        while len(self._placing) < MAX_PLACING:
            if self._leaving:
                self._start_placing(self._leaving.popleft())
                continue
            ticket = self._queues.pop(self._clock.now(), self._blocked.closed())
            if ticket is None:
                break
            self._blocked.take(ticket.queue)
            self._start_placing(ticket)

    def _start_placing(self, ticket: QueuedRequest) -> None:
        task = self._background.start_item(self._place(ticket), partial(self._fail, ticket))
        self._placing.add(task)
        task.add_done_callback(self._placing_ended)

    def _placing_ended(self, task: asyncio.Task[None]) -> None:
        self._placing.discard(task)
        self._wake.set()

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(TICK_S)
            self._retry_waiting(self._clock.now())

    def _retry_waiting(self, now: float) -> None:
        """Retries waiting requests. It is a separate function, as `_tick` would hold a loop's last
        ticket between two ticks.
        """
        for ticket in self._queues.remove_expired(now):
            error = DeadlineExceeded("the deadline passed while the request was queued")
            self._send_failed(ticket, error)
        with failing_alone("unserved_not_retried"):
            self._unserved.retry(now)
        with failing_alone("residency_not_decided"):
            self._decide_residency(now)
        closed = self._starts.closed(now)
        for queue in self._blocked.all():
            with failing_alone("queue_not_retried"):
                self._retry_queue(queue, closed)

    def _retry_queue(self, queue: QueueKey, closed: set[str]) -> None:
        is_served = self._workers.has_worker(
            queue.served, closed, queue.regions, features=queue.needs
        )
        if is_served and self._queues.has_any(queue):
            self._probe(queue)  # workers also become free between heartbeats
        else:
            self._unblock(queue)

    def _decide_residency(self, now: float) -> None:
        self._residency.decide(self._queues.held(), self._unserved.waiting_for_hosts(), now)

    def _requeue(self, ticket: QueuedRequest) -> None:
        self._queues.requeue(ticket, self._clock.now())
        self._wake.set()

    async def _change_roles(self) -> None:
        while True:
            await self._clock.sleep(ROLES_S)
            with failing_alone("roles_not_changed"):
                now = self._clock.now()
                for change in self._role_changes.decide(self._queues.held(), now):
                    await self._role_changes.send(change)

    async def _keep_alive(self) -> None:
        while True:
            await self._clock.sleep(KEEPALIVE_S)
            for gateway_id, request_ids in self._queues.request_ids_by_gateway().items():
                keepalive = QueueKeepalive(
                    scheduler_id=self._bus.process_id, request_ids=request_ids
                )
                with failing_alone("keepalive_not_sent", gateway=gateway_id):
                    await self._send(subjects.placement(gateway_id), keepalive)

    # ── placing ──────────────────────────────────────────────────────────────────────────────────

    async def _place(self, ticket: QueuedRequest) -> None:
        """Tries workers, best first, until the request is placed or failed, or none has room."""
        try:
            num_cached_blocks = await self._match(ticket.request)
            tried: set[str] = set()
            while not ticket.is_removed:
                target = self._best_target(ticket, num_cached_blocks, tried)
                if target is None:
                    return
                tried.add(target.decode_id)
                await self._start(ticket, target)
        except HearthError as error:
            self._fail(ticket, error)

    def _is_index_outside(self, request: Request) -> bool:
        """Whether an index that could answer may not have the hashes. Each class has its own."""
        if request.region_class or not request.allowed_regions:
            return False
        live = self.health_monitor.fleet.live("kv_index")
        return any(each.region not in request.allowed_regions for each in live)

    async def _match(self, request: Request) -> Mapping[str, int]:
        """Returns the cached blocks per worker; empty if the index does not reply, which
        costs only time.
        """
        if not request.block_hashes or self._is_index_outside(request):
            return {}
        question = MatchPrefix(
            tenant_id=request.tenant_id,
            model=request.model,
            revision=request.revision,
            block_hashes=request.block_hashes,
            region_class=request.region_class,
            num_public_blocks=request.num_public_blocks if request.region_class else 0,
        )
        try:
            reply = await self._requests.request(
                subjects.MATCH,
                subjects.MATCH,
                question,
                PrefixMatches,
                base_s=MATCH_TIMEOUT_S,
                unknown_s=0.0,  # a late reply is measured for the next request
            )
        except HearthError as error:
            log.debug("prefix_index_unavailable", reason=error.code)
            return {}
        return {match.worker_id: match.num_blocks for match in reply.matches}

    def _best_target(
        self, ticket: QueuedRequest, num_cached_blocks: Mapping[str, int], tried: set[str]
    ) -> Target | None:
        """Returns the best target, or None after requeueing the ticket, or if it waits for a worker
        to serve it. Raises NoCapacity or Overloaded for one that must not wait, or that is too long
        for all workers.
        """
        now = self._clock.now()
        if not self._candidates.has_any(ticket, now):
            knows_all = self.health_monitor.fleet.can_judge(now)
            if self._unserved.add(ticket, now, knows_all_workers=knows_all):
                self._decide_residency(now)  # it reads all requests: others wait for the tick
            return None
        excluded = self._excluded(ticket, now) | tried
        target = None
        if not ticket.is_leaving:
            here = self._workers.serving(ticket.queue.served)
            target = self._find(ticket, now)(
                workers=here, num_cached_blocks=num_cached_blocks, excluded=excluded
            )
        if target is None:
            target = self._target_elsewhere(ticket, excluded, now)
            if target is not None:
                self._probe(ticket.queue)  # the next one need not wait until the reply has crossed
        if target is None:
            self._check_sites_take(ticket, now)
            self._block(ticket, size_of(ticket))
        return target

    def _excluded(self, ticket: QueuedRequest, now: float) -> set[str]:
        """Returns the workers that may not get the request."""
        excluded, size = self._starts.excluded(ticket, now), size_of(ticket)
        mismatches = self._workers.numerics_mismatches(ticket.queue, size, excluded)
        excluded = excluded.union(mismatches)
        if ticket.submit.is_move:
            excluded.update(self._workers.unfit_for_move(ticket.queue, size))
        return excluded

    def _find(self, ticket: QueuedRequest, now: float) -> Callable[..., Target | None]:
        return partial(
            place,
            size_of(ticket),
            local_prefill=self._local_prefill,
            now=now,
            random_below=self._randomness.below,
        )

    def _target_elsewhere(
        self, ticket: QueuedRequest, excluded: set[str], now: float
    ) -> Target | None:
        """Returns the best target at another site, or None if the request does not leave, or none
        has room.
        """
        is_served_here = partial(self._candidates.has_local, ticket, now)
        elsewhere = self._sites.serving(ticket, now, is_served_here=is_served_here)
        if elsewhere is None:
            return None
        return self._find(ticket, now)(
            workers=elsewhere,
            num_cached_blocks=self._sites.num_cached_blocks(ticket.request),
            excluded=excluded | self._sites.closed(now),
            prefers_holders=False,
        )

    def _check_sites_take(self, ticket: QueuedRequest, now: float) -> None:
        """Raises NoCapacity for a request that has left its worker, the only one here, and that no
        other site has taken: it may be served again where it was.
        """
        is_late = now - ticket.queued_at >= NO_WORKER_GRACE_S
        if is_late and self._candidates.is_left_to_sites(ticket, now):
            raise NoCapacity("no other site takes the request", retry_after_s=0.0)

    def _block(self, ticket: QueuedRequest, needs: RequestSize) -> None:
        """Requeues the ticket until a worker opens or a heartbeat reports room. Raises Overloaded
        for a ticket that must not wait.
        """
        queue, now = ticket.queue, self._clock.now()
        if not ticket.is_queueable:
            raise self._queues.busy(queue)
        decodes = self._workers.serving(queue.served).decodes
        opens_in_s = decodes.opens_at(queue.regions, queue.needs) - now
        # If workers have long been open, the queue lacks room, not time.
        if -MIN_CLOSED_S < opens_in_s < TICK_S and queue not in self._opening:
            self._opening.add(queue)
            probing = self._probe_after(queue, max(opens_in_s, MIN_CLOSED_S))
            self._background.start_item(probing, is_logged)
        self._blocked.block(queue, needs)
        self._queues.requeue(ticket, now)
        for other in self._queues.must_not_wait(queue):
            if not self._leave_home(other, now):
                self._fail(other, self._queues.busy(queue))

    async def _probe_after(self, queue: QueueKey, delay_s: float) -> None:
        """Retries the queue once the first worker has done enough of its assigned work."""
        await self._clock.sleep(delay_s)
        self._opening.discard(queue)
        self._probe(queue)

    def _probe(self, queue: QueueKey) -> None:
        if self._blocked.allow_probe(queue):
            self._wake.set()

    def _unblock(self, queue: QueueKey) -> None:
        if self._blocked.unblock(queue):
            self._wake.set()

    async def _start(self, ticket: QueuedRequest, target: Target) -> None:
        ticket.chosen_at = self._clock.now()
        placement_id = await self._starts.start(ticket, target, size_of(ticket))
        self._sites.answered(target.decode_id, ticket.chosen_at, is_taken=placement_id is not None)
        if placement_id is not None:
            self._unblock(ticket.queue)
            await self._started(ticket, target, placement_id)

    def _started_late(self, ticket: QueuedRequest, target: Target, placement_id: bytes) -> None:
        self._unblock(ticket.queue)
        self._background.start_item(
            self._started(ticket, target, placement_id), partial(self._fail, ticket)
        )

    async def _started(self, ticket: QueuedRequest, target: Target, placement_id: bytes) -> None:
        worker_id = target.decode_id
        if ticket.is_removed:  # cancelled, expired, its gateway lost, or started by another worker
            await self._abort(worker_id, placement_id)
            return
        now = self._clock.now()
        self._queues.placed(ticket, now)
        self._count_placed(ticket, worker_id, now)
        request, chosen_at = ticket.request, ticket.chosen_at
        if chosen_at is None:
            chosen_at = now
        placed = Placed(
            request_id=request.request_id,
            placement_id=placement_id,
            worker_id=worker_id,
            has_unlike_prefill=target.has_unlike_prefill,
            needs=request.needs,
            queued_s=chosen_at - ticket.queued_at,
            placement_s=now - chosen_at,
            scheduler_id=self._bus.process_id,
            attempt=ticket.submit.attempt,
        )
        await self._send(subjects.placement(request.gateway_id), placed)

    def _count_placed(self, ticket: QueuedRequest, worker_id: str, now: float) -> None:
        if self._linked is not None and subjects.is_at_site(worker_id):
            self._linked.count(worker_id, "num_placed")
            if self._candidates.has_local(ticket, now):
                self._linked.count(worker_id, "num_spilled")

    # ── outgoing messages ────────────────────────────────────────────────────────────────────────

    def _fail(self, ticket: QueuedRequest, error: Exception) -> None:
        """Fails a ticket, unless it has already ended."""
        if not ticket.is_removed:
            self._queues.remove(ticket.request.request_id)
            self._send_failed(ticket, error)

    def _send_failed(self, ticket: QueuedRequest, error: Exception) -> None:
        request = ticket.request
        failed = PlacementFailed(
            request_id=request.request_id,
            scheduler_id=self._bus.process_id,
            attempt=ticket.submit.attempt,
            failure=failure_of(error),
        )
        subject = subjects.placement(request.gateway_id)
        task = self._background.start_item(self._send(subject, failed), is_logged)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def _abandon(self, worker_id: str, placement_id: bytes) -> None:
        self._background.start_item(self._abort(worker_id, placement_id), is_logged)

    async def _abort(self, worker_id: str, placement_id: bytes) -> None:
        message = AbortRequest(placement_id=placement_id, reason="superseded")
        await self._send(subjects.control("decode", worker_id), message)

    async def _send(self, subject: str, message: Message) -> None:
        try:
            await self._bus.publish(subject, message)
        except DependencyUnavailable as error:  # the gateway detects this and resubmits
            log.warning("publish_failed", subject=subject, error=error.message)


async def build_scheduler(config: SchedulerConfig) -> SchedulerService:
    """Builds the scheduler's process. Raises ConfigError, or DependencyUnavailable
    without a NATS server.
    """
    check(config)
    bus = await connect(config, "scheduler")
    return SchedulerService(
        config,
        bus,
        MonotonicClock(),
        SystemRandomness(),
        on_first_worker=use_compiled_loops,  # an earlier compilation would delay the start
    )
