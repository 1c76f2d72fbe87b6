"""Connects the recovery core to the bus, without a web server or tokenizer.

Each message is passed to `Streams`, and the actions that `Streams` requests are performed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from services.gateway.streams.actions import (
    Publish,
    Report,
    ReportBrokenSteps,
    ReportNumericsChange,
    ReportResubmission,
    ReportUnlikePrefill,
    Resend,
    Submit,
    is_bound,
    submit_subject,
)
from services.gateway.streams.changed_regions import ChangedRegions
from services.gateway.streams.fair_starts import FairStarts
from services.gateway.streams.queued_openings import MAX_OPEN, Opening
from services.gateway.streams.streams import Streams
from shared.background import Background
from shared.clock import Clock
from shared.errors import HearthError, NoResponders
from shared.lifecycle.health import TICK_S, Loss
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import (
    AbortReason,
    Placed,
    PlacementFailed,
    Queued,
    QueueKeepalive,
    Request,
    SubmitRequest,
    TokenBatch,
)
from shared.subjects import SUBMIT, owner_of, placement, resend, tokens
from shared.transport.bus import Bus, error_of, failure_of
from shared.transport.outbox import Outbox

log = structlog.get_logger(__name__)

SUBMIT_TIMEOUT_S = 0.25  # plus the round trip
RESEND_TIMEOUT_S = 0.5
MAX_STOPPED = 64
MAX_SUBMITS_PER_TURN = 16  # a response may open 256 requests at once


class StreamDriver:
    """Drives all open requests of one gateway. Its owner starts and stops the HealthMonitor."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        health_monitor: HealthMonitor,
        *,
        on_report: Callable[[Report], None] = lambda report: None,
        num_free: Callable[[], int] = lambda: MAX_OPEN,
    ) -> None:
        """`num_free` returns how many more requests the gateway has capacity for."""
        self._bus = bus
        self._clock = clock
        self._health_monitor = health_monitor
        self._on_report = on_report
        self._streams = Streams(bus.process_id, num_free)
        self._outbox = Outbox(bus)
        self._background = Background()
        self._submits = FairStarts(max_per_turn=MAX_SUBMITS_PER_TURN)
        self._is_idle = asyncio.Event()
        self._is_stopped = False
        self._stopped = deque[str](maxlen=MAX_STOPPED)  # their `Placed` may arrive late

    def __len__(self) -> int:
        """Returns the number of open requests."""
        return len(self._streams)

    async def start(self) -> None:
        own = self._bus.process_id
        await self._bus.subscribe(tokens(own), TokenBatch, self.take_tokens)
        messages = Placed | PlacementFailed | QueueKeepalive
        await self._bus.subscribe(placement(own), messages, self._on_placement)
        self._health_monitor.on_lost(self._on_lost)
        self._outbox.start()
        self._background.start_own(self._tick())

    async def stop(self) -> None:
        """Stops sending requests to schedulers and workers. Messages that were posted are still
        sent.
        """
        self._is_stopped = True
        await self._background.stop()
        self._perform(with_acknowledgements=True)
        await self._outbox.stop()

    async def idle(self) -> None:
        """Returns when no request is open."""
        while len(self._streams):
            self._is_idle.clear()
            await self._is_idle.wait()

    def open(self, openings: Sequence[Opening]) -> None:
        """Opens the requests of one response: some at once, the others when those end."""
        self._streams.open(openings, self._clock.now())
        self._perform()

    def close(self, request_id: str, reason: AbortReason, error: HearthError) -> None:
        """Ends a request early. Does nothing if the request has ended."""
        self._streams.close(request_id, reason, error, self._clock.now())
        self._perform()

    def close_tenant(self, tenant_id: str, error: HearthError) -> None:
        """Ends all requests of a tenant."""
        self._streams.close_tenant(tenant_id, error, self._clock.now())
        self._perform()

    def close_all(self, error: HearthError) -> None:
        self._streams.close_all(error, self._clock.now())
        self._perform()

    def is_waiting(self, request_id: str) -> bool:
        """Whether an open request has no worker, or one that has no room for it now."""
        return self._streams.is_waiting(request_id)

    def change_regions(self, changed: ChangedRegions) -> None:
        """Applies the regions that a tenant has now to its requests."""
        self._streams.change_regions(changed, self._clock.now())
        self._perform()

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def take_tokens(self, batch: TokenBatch) -> None:
        self._streams.on_token_batch(batch, self._clock.now())
        self._perform()

    def _on_placement(self, message: Placed | PlacementFailed | QueueKeepalive) -> None:
        now = self._clock.now()
        match message:
            case Placed():
                self._streams.on_placed(message, now)
                worker_id = message.worker_id
                is_live = self._health_monitor.fleet.is_live(worker_id)
                if worker_id in self._stopped and not is_live:
                    self._streams.on_worker_lost(worker_id, now, is_excluded=True)
            case PlacementFailed():
                self._streams.on_placement_failed(message, now)
            case QueueKeepalive():
                self._streams.on_keepalive(message, now)
        self._perform()

    def _on_lost(self, process_id: str, loss: Loss) -> None:
        now = self._clock.now()
        if loss is Loss.STOPPED:  # other workers may be alive, and silent only to this gateway
            self._stopped.append(process_id)
        is_excluded = loss in (Loss.UNRESPONSIVE, Loss.STUCK, Loss.DISCONNECTED, Loss.DOUBLED)
        self._streams.on_worker_lost(process_id, now, is_excluded=is_excluded)
        self._streams.on_scheduler_lost(process_id, now)
        self._perform()

    async def _tick(self) -> None:
        fleet, was_connected = self._health_monitor.fleet, True
        while True:
            await self._clock.sleep(TICK_S)
            now, is_connected = self._clock.now(), self._bus.is_connected
            if is_connected and not was_connected:
                self._streams.on_bus_back(now)
            was_connected = is_connected
            for worker_id in self._streams.unresponsive_workers(now):
                # `Placed` may arrive after the loss was reported
                if fleet.heartbeat_of(worker_id) is not None and not fleet.is_live(worker_id):
                    self._streams.on_worker_lost(worker_id, now, is_excluded=True)
            self._streams.tick(now, is_bus_trusted=fleet.can_judge(now))
            self._perform(with_acknowledgements=True)

    # ── actions ──────────────────────────────────────────────────────────────────────────────────

    def _perform(self, *, with_acknowledgements: bool = False) -> None:
        """Performs the queued actions. Only the tick sends AckFinished, in one message a worker."""
        actions = self._streams.take_actions(with_acknowledgements=with_acknowledgements)
        for action in actions:
            match action:
                case Publish():
                    self._outbox.post(action.subject, action.message)
                case Submit():
                    start = partial(self._start_submit, action)
                    self._submits.start(action.message.request.queue_id, start)
                case Resend():
                    self._start_resend(action)
                case _:
                    _log(action)
                    self._on_report(action)
        if not len(self._streams):
            self._is_idle.set()

    def _start_submit(self, action: Submit) -> None:
        if self._is_stopped or not self._streams.is_due(action.message):
            return
        fail = partial(self._fail, action.message.request.request_id)
        self._background.start_item(self._submit(action), fail)

    def _start_resend(self, action: Resend) -> None:
        if not self._is_stopped:
            fail = partial(self._fail_resend, action)
            self._background.start_item(self._resend(action), fail)

    async def _submit(self, action: Submit) -> None:
        message = action.message
        request_id, attempt = message.request.request_id, message.attempt
        try:
            subject = submit_subject(message, self._schedulers_for(message.request))
            reply = await self._request_from_scheduler(subject, message)
        except HearthError as error:
            now = self._clock.now()
            is_trusted = self._health_monitor.fleet.can_judge(now)
            self._streams.on_rejected(request_id, attempt, error, now, is_bus_trusted=is_trusted)
        else:
            self._streams.on_queued(request_id, attempt, reply, self._clock.now())
        self._perform()

    def _schedulers_for(self, request: Request) -> list[str]:
        """Returns the live schedulers that may have the request."""
        live = self._health_monitor.fleet.live("scheduler")
        regions = request.allowed_regions if is_bound(request) else ()
        return sorted(e.process_id for e in live if not regions or e.region in regions)

    async def _request_from_scheduler(self, subject: str, message: SubmitRequest) -> Queued:
        """Submits to the subject, and then to SUBMIT. Raises NoResponders only if SUBMIT has no
        subscriber.
        """
        try:
            return await self._submit_to(subject, message)
        except NoResponders:
            if subject == SUBMIT or is_bound(message.request):
                raise
        return await self._submit_to(SUBMIT, message)

    async def _submit_to(self, subject: str, message: SubmitRequest) -> Queued:
        requests, peer = self._health_monitor.requests, owner_of(subject) or subject
        return await requests.request(peer, subject, message, Queued, base_s=SUBMIT_TIMEOUT_S)

    def _fail(self, request_id: str, error: Exception) -> None:
        self.close(request_id, "failed", error_of(failure_of(error)))

    def _fail_resend(self, action: Resend, error: Exception) -> None:
        request_id = self._streams.request_of(action.message.placement_id)
        if request_id is not None:
            self._fail(request_id, error)

    async def _resend(self, action: Resend) -> None:
        subject = resend(action.worker_id)
        try:
            batch = await self._health_monitor.requests.request(
                action.worker_id, subject, action.message, TokenBatch, base_s=RESEND_TIMEOUT_S
            )
        except HearthError as error:
            now = self._clock.now()
            is_trusted = self._health_monitor.fleet.can_judge(now)
            self._streams.on_resend_failed(action.message, error, now, is_bus_trusted=is_trusted)
        else:
            self._streams.on_resent(action.message, batch, self._clock.now())
        self._perform()


def _log(report: Report) -> None:
    match report:
        case ReportResubmission(request_id, cause, worker_id):
            log.info("request_resubmitted", request=request_id, cause=cause, worker=worker_id)
        case ReportBrokenSteps(request_id, tenant_id):
            log.warning("request_breaks_workers", request=request_id, tenant=tenant_id)
        case ReportNumericsChange(request_id, worker_id, before, after):
            numerics = {"before": str(before), "after": str(after)}
            log.warning("numerics_changed", request=request_id, worker=worker_id, **numerics)
        case ReportUnlikePrefill(request_id, worker_id):
            log.info("prefill_workers_unlike", request=request_id, worker=worker_id)
