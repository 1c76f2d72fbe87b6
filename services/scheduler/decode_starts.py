"""Starts requests on decode workers: StartDecode, its reply, a late reply or none.

StartDecode ──reply in time──▶ started, or rejected by this worker
     └──timeout──┬──late reply──▶ started, if the request still waits
                 └──no reply────▶ aborted, as the worker may hold the placement

A worker that leaves several starts unanswered is closed for a while (`silent_workers.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import structlog

from services.scheduler.backlog import QueuedRequest
from services.scheduler.fleet import WorkerFleet
from services.scheduler.placement import RequestSize, Target
from services.scheduler.silent_workers import SilentWorkers
from shared import subjects
from shared.clock import Clock
from shared.errors import (
    DeadlineExceeded,
    DependencyUnavailable,
    HearthError,
    InvalidRequest,
    RequestTimeout,
    WorkerUnfit,
)
from shared.messages import DecodeStarted, Failure, StartDecode
from shared.randomness import Randomness
from shared.tenancy.refusals import Refusals
from shared.transport.timed_requests import TimedRequests

log = structlog.get_logger(__name__)

START_TIMEOUT_S = 0.1  # plus the round trip
SILENT_GRACE_S = 3.0  # time after the request's first start that no worker answered
NUM_PLACEMENT_ID_BYTES = 16


class DecodeStarts:
    def __init__(
        self,
        requests: TimedRequests,
        workers: WorkerFleet,
        clock: Clock,
        randomness: Randomness,
        *,
        on_late: Callable[[QueuedRequest, Target, bytes], None],
        abandon: Callable[[str, bytes], None],
        refusals: Refusals,
        site: str = "",
    ) -> None:
        """Calls `on_late(ticket, target, placement_id)` when a worker has started the request after
        its timeout, and `abandon(worker_id, placement_id)` to abort a placement. `site` is the name
        of this site for others.
        """
        self._requests = requests
        self._refusals = refusals
        self._workers = workers
        self._clock = clock
        self._randomness = randomness
        self._on_late = on_late
        self._abandon = abandon
        self._site = site
        self._silent_workers = SilentWorkers()

    async def start(
        self, ticket: QueuedRequest, target: Target, needs: RequestSize
    ) -> bytes | None:
        """Tries one worker. Returns the new placement id, or None if another worker may be tried.
        Raises errors that any worker would return.
        """
        worker_id = target.decode_id
        placement_id = self._randomness.bytes(NUM_PLACEMENT_ID_BYTES)
        message = self._message(ticket, target, placement_id)
        assignment = self._workers.assign(target, needs, self._clock.now())
        sent_at = self._clock.now()
        try:
            await self._requests.request(
                worker_id,
                subjects.start_decode(worker_id),
                message,
                DecodeStarted,
                base_s=START_TIMEOUT_S,
                on_late=lambda reply: self._take_late(ticket, target, placement_id, reply),
            )
            self._workers.confirm(assignment, self._clock.now())
        except HearthError as error:
            self._count_silence(ticket, worker_id, error, sent_at)
            is_of_request = isinstance(error, InvalidRequest | DeadlineExceeded)
            if is_of_request and not subjects.is_at_site(worker_id):
                raise  # another site may have other rules
            self._set_aside(ticket, worker_id, error)
            return None
        finally:
            if assignment.confirmed_at is None:
                self._workers.release(assignment, self._clock.now())
        self._silent_workers.forget(worker_id)
        return placement_id

    def excluded(self, ticket: QueuedRequest, now: float) -> set[str]:
        """Returns the gateway's exclusions, workers that the request does not fit, and those that
        are closed because they do not reply. A request that waits too long for one that replies
        tries none that has just been silent.
        """
        silent, since = self._silent_workers, ticket.silent_since
        is_late = since is not None and now - since >= SILENT_GRACE_S
        return (silent.silent() if is_late else silent.closed(now)).union(ticket.excluded_workers)

    def closed(self, now: float) -> set[str]:
        """Returns the workers that get no request because they do not reply."""
        return self._silent_workers.closed(now)

    def lost(self, worker_id: str) -> None:
        self._silent_workers.forget(worker_id)

    def _message(self, ticket: QueuedRequest, target: Target, placement_id: bytes) -> StartDecode:
        remaining_s = ticket.deadline_at - self._clock.now()
        if remaining_s <= 0:
            raise DeadlineExceeded("the deadline passed while the request was placed")
        self._refusals.require(
            "scheduler", ticket.request, self._workers.region_of(target.decode_id)
        )
        request = msgspec.structs.replace(ticket.request, deadline_s=remaining_s)
        if subjects.is_at_site(target.decode_id):
            owner = subjects.at_site(self._site, request.gateway_id)
            request = msgspec.structs.replace(request, gateway_id=owner)
        return StartDecode(
            placement_id=placement_id,
            request=request,
            prefill_candidates=target.prefill_candidates,
            candidate_regions=tuple(
                (each, self._workers.region_of(each))
                for each in target.prefill_candidates
                if subjects.is_at_site(each)
            ),
            # a move waits there as well as here, and goes on where its next token comes first
            is_queueable=ticket.submit.is_queueable or ticket.submit.is_move,
        )

    def _set_aside(self, ticket: QueuedRequest, worker_id: str, error: HearthError) -> None:
        log.info("start_decode_rejected", worker=worker_id, reason=error.code)
        if isinstance(error, WorkerUnfit):  # other requests may fit
            ticket.unfit_workers.add(worker_id)
        else:
            self._workers.avoid(worker_id)

    def _count_silence(
        self, ticket: QueuedRequest, worker_id: str, error: HearthError, sent_at: float
    ) -> None:
        if not isinstance(error, DependencyUnavailable):  # the worker has replied
            self._silent_workers.forget(worker_id)
        elif isinstance(error, RequestTimeout):
            if ticket.silent_since is None:
                ticket.silent_since = sent_at
            if not self._workers.knows(worker_id):  # lost meanwhile: nothing would forget it again
                return
            closed_s = self._silent_workers.record(worker_id, sent_at, self._clock.now())
            if closed_s is not None:
                log.warning("worker_closed", worker=worker_id, seconds=closed_s)

    def _take_late(
        self,
        ticket: QueuedRequest,
        target: Target,
        placement_id: bytes,
        reply: DecodeStarted | Failure | None,
    ) -> None:
        """Handles the reply of a worker that came after the next try began, as between distant
        sites.

        The first worker that replies has the request.
        """
        if reply is not None:
            self._silent_workers.forget(target.decode_id)
        match reply:
            case DecodeStarted():
                self._on_late(ticket, target, placement_id)
            case None:
                self._abandon(target.decode_id, placement_id)
