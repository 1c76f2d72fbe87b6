"""The recovery core: the state of all open requests and the actions that each event requires.

Synchronous and without I/O: each method handles one event and queues `Action`s, which
`take_actions` returns. The states of one request are in `stream.py`. The rules:

- A stream accepts tokens only from the placement that `Placed` named. Entries that arrive earlier
  are buffered; AbortRequest answers placements that are not named in time or have been aborted.
- A gap, or silence of a running choice, triggers a ResendTokens request to the worker.
- A choice with a stop string is aborted while others run, and again if its tokens continue.
- A request that waits for room at its worker asks for another one (`moves.py`), and goes on where
  its next token comes from first.
- A lost worker, an unknown placement or a retryable failure resubmits the request with all tokens
  received, within a budget; a worker that is silent or failed is excluded.
- The loss of another site is another budget (`resubmissions.py`), and excludes nobody.
- A resubmission names the numerics of the tokens received; a change of numerics is counted.
- A placement of a submission without all tokens received is aborted: its scheduler was frozen.
- A placement that does not repeat the request's `needs` is aborted: an older scheduler has dropped
  them, and the worker would serve the request wrongly.
- A choice whose grammar cannot be followed ends where it is and is not resubmitted; the others
  continue. If no choice is left, the request fails.
- A request ends if steps with it alone raised twice, on two workers if there are two.
- A queued request that its scheduler's keepalives do not name is lost and resubmitted.
- A limited number of requests of one response, and of a tenant, are open at once. Each that ends
  opens the tenant's next one, or two while the gateway has capacity; one that fails ends the
  waiting requests of its response.
- Every stream ends once, through `_end`, and every waiting request through `_end_waiting`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from services.gateway.streams.actions import (
    Action,
    Actions,
    ReportBrokenSteps,
    ReportNumericsChange,
    ReportResubmission,
    ReportUnlikePrefill,
    ResubmissionCause,
)
from services.gateway.streams.changed_regions import ChangedRegions
from services.gateway.streams.choice_tokens import ChoiceTokens
from services.gateway.streams.early_entries import (
    ANSWER_EVERY_S,
    MAX_EARLY_ENTRIES,
    MAX_EARLY_VALUES,
    EarlyEntries,
    RetiredPlacements,
)
from services.gateway.streams.moves import MoveOffer
from services.gateway.streams.queued_openings import (
    MAX_OPEN,
    Opening,
    QueuedOpenings,
    TenantOpenings,
)
from services.gateway.streams.receiver import GuardedReceiver, StreamEnd
from services.gateway.streams.resubmissions import (
    excluded_after_silence,
    recovery_window_s,
    was_at_site,
)
from services.gateway.streams.stream import (
    CurrentPlacement,
    Stream,
    StreamState,
)
from services.gateway.streams.try_record import TryRecord
from shared.background import failing_alone, item_error
from shared.errors import (
    ContextFull,
    DeadlineExceeded,
    DependencyUnavailable,
    DeviceFailed,
    GrammarReplayFailed,
    GrammarTooComplex,
    HearthError,
    NoCapacity,
    NoResponders,
    OutOfMemory,
    Overloaded,
    RequestBreaksWorkers,
    SendForbidden,
    StepFailed,
    UnknownPlacement,
    WorkerBusy,
)
from shared.messages import (
    AbortReason,
    Finish,
    Placed,
    PlacementFailed,
    Queued,
    QueueKeepalive,
    ResendTokens,
    Served,
    SubmitRequest,
    TokenBatch,
    TokenEntry,
)
from shared.numerics import Numerics
from shared.subjects import is_at_site
from shared.transport.bus import error_of

# Submission window of a new request: NATS takes 3 s to detect a hung member of the schedulers'
# queue group, and the attempts that this member receives until then are lost.
SUBMIT_WINDOW_S = 4.0
NO_SCHEDULER_WINDOW_S = 0.5  # the window if NATS reports no responders
NEXT_LACK_S = 4.0  # two NoCapacity failures within this time share one window
SUBMIT_BACKOFF_S = 0.1
MIN_TRIES = 3  # a frozen gateway may resume after the window without having tried
KEEPALIVE_LIMIT_S = 1.5
MAX_CHANGED_REGIONS = 10_000  # tenants
SILENCE_S = 1.0  # the limit if the worker is lost; otherwise TOKEN_TIMEOUT_S
TOKEN_TIMEOUT_S = 2.0
RESEND_RETRY_S = 0.3
MAX_FAILED_RESENDS = 3
MAX_OUT_OF_MEMORY = 2
MAX_FAILED_STEPS = 2  # steps with one request alone, on different workers if there are several

# Rejections that are retried; those in `_PATIENT` only in recovery or with retry_after_s=0.
_TRANSIENT = (DependencyUnavailable, DeviceFailed, WorkerBusy, UnknownPlacement)
_PATIENT = (NoCapacity, Overloaded)
_OF_ONE_CHOICE = (GrammarTooComplex, GrammarReplayFailed)


class Streams:
    def __init__(self, gateway_id: str, num_free: Callable[[], int] = lambda: MAX_OPEN) -> None:
        """`num_free` returns how many more requests the gateway has capacity for."""
        self._num_free = num_free
        self._by_request: dict[str, Stream] = {}
        self._by_placement: dict[bytes, Stream] = {}
        self._waiting: dict[str, QueuedOpenings] = {}  # unopened requests by id
        self._tenants: dict[str, TenantOpenings] = {}  # tenants with open requests
        self._changed_regions: dict[str, ChangedRegions] = {}  # by tenant, the latest change last
        self._early = EarlyEntries()
        # other sites push out no entries of this site's workers
        self._early_of_sites = EarlyEntries(MAX_EARLY_ENTRIES // 4, MAX_EARLY_VALUES // 4)
        self._retired = RetiredPlacements()
        self._actions = Actions(gateway_id)

    def __len__(self) -> int:
        return len(self._by_request)

    def request_ids(self) -> list[str]:
        return list(self._by_request)

    def take_actions(self, *, with_acknowledgements: bool = True) -> list[Action]:
        return self._actions.take(with_acknowledgements=with_acknowledgements)

    def unresponsive_workers(self, now: float) -> set[str]:
        """Returns the workers of placements that have sent no tokens for SILENCE_S."""
        placements = (stream.placement for stream in self._by_placement.values())
        return {
            placement.worker_id
            for placement in placements
            if placement is not None and now - placement.last_token_at >= SILENCE_S
        }

    # ── calls of the gateway ─────────────────────────────────────────────────────────────────────

    def open(self, openings: Sequence[Opening], now: float) -> None:
        """Opens the requests of one response: at least one, and more if there is capacity."""
        tenant_id = openings[0].request.tenant_id
        changed = self._changed_regions.get(tenant_id)
        if changed is not None:  # the regions may be those that were read before the change
            openings = [replace(each, request=changed.applied(each.request)) for each in openings]
            if changed.error is not None:
                _end_unopened(openings, changed.error)
                return
        tenant = self._tenants.setdefault(tenant_id, TenantOpenings())
        queue = QueuedOpenings(openings, now, tenant)
        self._waiting |= dict.fromkeys((each.request_id for each in openings), queue)
        for _ in openings[: tenant.num_at_once(self._num_free())]:
            self._open_next(queue, now)

    def _open_next(self, queue: QueuedOpenings, now: float) -> None:
        opening = queue.take_next(now)
        if opening is None:
            return
        del self._waiting[opening.request_id]
        stream = Stream(opening, now, queue=queue)
        self._open_window(stream, now)
        self._by_request[stream.request_id] = stream
        self._submit(stream, now)

    def request_of(self, placement_id: bytes) -> str | None:
        stream = self._by_placement.get(placement_id)
        return None if stream is None else stream.request_id

    def is_due(self, message: SubmitRequest) -> bool:
        """Whether the request still waits for this submission attempt."""
        request_id = message.request.request_id
        if message.is_move:
            return self._asking(request_id, message.attempt) is not None
        return self._submitting(request_id, message.attempt) is not None

    def is_waiting(self, request_id: str) -> bool:
        """Whether an open request has no worker, or one that has no room for it now."""
        stream = self._by_request.get(request_id)
        if stream is None:
            return request_id in self._waiting
        return stream.placement is None or stream.placement.is_waiting

    def _asking(self, request_id: str, attempt: int) -> Stream | None:
        stream = self._by_request.get(request_id)
        return stream if stream is not None and stream.is_offered(attempt) else None

    def _submitting(self, request_id: str, attempt: int) -> Stream | None:
        stream = self._by_request.get(request_id)
        if stream is None or stream.attempt != attempt:
            return None
        return stream if stream.state is StreamState.SUBMITTING else None

    def close(self, request_id: str, reason: AbortReason, error: HearthError, now: float) -> None:
        """Ends a request early. Does nothing if it has ended."""
        stream, queue = self._by_request.get(request_id), self._waiting.get(request_id)
        if stream is not None:
            self._end(stream, error, reason, now)
        elif queue is not None:
            self._end_waiting([queue.take(request_id)], error)

    def close_all(self, error: HearthError, now: float) -> None:
        """Ends all requests, the waiting ones first: the end of an open one would otherwise open
        them.
        """
        for queue in dict.fromkeys(self._waiting.values()):
            self._end_waiting(queue.take_all(), error)
        for request_id in self.request_ids():
            self.close(request_id, "failed", error, now)

    def close_tenant(self, tenant_id: str, error: HearthError, now: float) -> None:
        """Ends all requests of a tenant, the waiting ones first."""
        tenant = self._tenants.get(tenant_id)
        for queue in [] if tenant is None else list(tenant.waiting):
            self._end_waiting(queue.take_all(), error)
        for stream in list(self._by_request.values()):
            if stream.request.tenant_id == tenant_id:
                self._end(stream, error, "failed", now)

    def change_regions(self, changed: ChangedRegions, now: float) -> None:
        """Ends the requests of a tenant, or has those go on in its regions of now that may be
        elsewhere: wherever they are queued, computed or decoded, they are submitted again.
        """
        self._changed_regions.pop(changed.tenant_id, None)
        if changed.is_gone and changed.error is None:
            return
        self._changed_regions[changed.tenant_id] = changed
        if len(self._changed_regions) > MAX_CHANGED_REGIONS:
            del self._changed_regions[next(iter(self._changed_regions))]
        if changed.error is not None:
            self.close_tenant(changed.tenant_id, changed.error, now)
            return
        tenant = self._tenants.get(changed.tenant_id)
        for queue in () if tenant is None else tenant.waiting:
            queue.change(changed.applied)
        own = [e for e in self._by_request.values() if e.request.tenant_id == changed.tenant_id]
        for stream in own:
            is_narrowed = changed.narrows(stream.request)
            stream.request = changed.applied(stream.request)
            if is_narrowed:
                self._resubmit(stream, "regions_changed", now)

    # ── schedulers ───────────────────────────────────────────────────────────────────────────────

    def on_queued(self, request_id: str, attempt: int, reply: Queued, now: float) -> None:
        if request_id not in self._by_request:
            self._actions.cancel(reply.scheduler_id, request_id, attempt)
        elif (stream := self._submitting(request_id, attempt)) is not None:
            self._queue(stream, reply.scheduler_id, now)
        elif (stream := self._asking(request_id, attempt)) is not None and stream.offer is not None:
            stream.offer.scheduler_id = reply.scheduler_id

    def on_rejected(
        self,
        request_id: str,
        attempt: int,
        error: HearthError,
        now: float,
        *,
        is_bus_trusted: bool = True,
    ) -> None:
        asking = self._asking(request_id, attempt)
        if asking is not None:
            self._decline(asking, now)
        stream = self._submitting(request_id, attempt)
        if stream is None:
            return
        if isinstance(error, SendForbidden):  # to any scheduler
            self._end(stream, error, "failed", now)
            return
        is_patient = stream.is_recovering or error.retry_after_s == 0  # 0: retry at once
        is_hopeful = isinstance(error, _TRANSIENT) or (is_patient and isinstance(error, _PATIENT))
        if isinstance(error, NoCapacity):
            stream.excluded_workers.clear()  # a worker that was lost may be the only one
        give_up_at = stream.give_up_at
        if isinstance(error, NoResponders) and is_bus_trusted and not stream.was_accepted:
            give_up_at = min(give_up_at, stream.window_opened_at + NO_SCHEDULER_WINDOW_S)
        is_early = now + SUBMIT_BACKOFF_S < give_up_at or stream.num_tries < MIN_TRIES
        if is_hopeful and is_early:
            stream.submit_at = now + SUBMIT_BACKOFF_S
            return
        if isinstance(error, _TRANSIENT):
            error = NoCapacity(f"no scheduler accepted the request: {error}", retry_after_s=1.0)
        self._end(stream, error, "failed", now)

    def on_placed(self, placed: Placed, now: float) -> None:
        stream = self._by_request.get(placed.request_id)
        if stream is not None and stream.placement is not None:
            if stream.is_offered(placed.attempt):
                self._take_offer(stream, placed, now)
            elif stream.placement.placement_id != placed.placement_id and not (
                stream.offer is not None and stream.offer.is_of(placed.placement_id)
            ):
                self._abort(placed.worker_id, placed.placement_id, "superseded", now)
            return
        if stream is None or placed.worker_id in stream.excluded_workers:
            self._abort(placed.worker_id, placed.placement_id, "superseded", now)
            if stream is not None:
                self._resubmit(stream, "worker_excluded", now)
            return
        if stream.is_outdated(placed):  # a newer submission is under way
            self._abort(placed.worker_id, placed.placement_id, "superseded", now)
            return
        if placed.needs != stream.request.needs:
            self._abort(placed.worker_id, placed.placement_id, "superseded", now)
            self._resubmit(stream, "needs_dropped", now)
            return
        # The placement has been aborted, or it belongs to another request.
        if placed.placement_id in self._retired or placed.placement_id in self._by_placement:
            self._resubmit(stream, "placement_retired", now)
            return
        self._run(stream, placed, now)

    def on_placement_failed(self, failed: PlacementFailed, now: float) -> None:
        stream = self._by_request.get(failed.request_id)
        if stream is not None and stream.is_offered(failed.attempt):
            self._decline(stream, now)
        if stream is None or not _is_present(failed, stream):
            return
        error = error_of(failed.failure)
        if stream.state is StreamState.QUEUED:
            stream.transition_to(StreamState.SUBMITTING)
            if not _lacks_worker_again(stream, error, now):
                self._open_window(stream, now)
        self.on_rejected(failed.request_id, stream.attempt, error, now)

    def on_keepalive(self, keepalive: QueueKeepalive, now: float) -> None:
        for request_id in keepalive.request_ids:
            stream = self._by_request.get(request_id)
            attempt = None if stream is None else stream.attempt
            if stream is not None and stream.is_offered(stream.attempt):
                continue  # it is asked for no longer than MAX_OFFER_S
            if stream is None or stream.state is StreamState.RUNNING:
                self._actions.cancel(keepalive.scheduler_id, request_id, attempt)
            elif stream.state is StreamState.SUBMITTING:  # the `Queued` reply was late or lost
                self._queue(stream, keepalive.scheduler_id, now)
            elif stream.scheduler_id == keepalive.scheduler_id:
                stream.keepalive_at = now
            else:
                self._actions.cancel(keepalive.scheduler_id, request_id, attempt)

    def on_scheduler_lost(self, scheduler_id: str, now: float) -> None:
        for stream in list(self._by_request.values()):
            if stream.state is StreamState.QUEUED and stream.scheduler_id == scheduler_id:
                self._resubmit(stream, "scheduler_lost", now)
            elif stream.offer is not None and stream.offer.scheduler_id == scheduler_id:
                self._decline(stream, now)

    def on_bus_back(self, now: float) -> None:
        """Recovers messages that were lost with the connection. Silent choices soon trigger a
        resend. Queued requests are resubmitted, since their `Placed` may be lost.
        """
        for stream in list(self._by_request.values()):
            if stream.state is StreamState.QUEUED:
                self._resubmit(stream, "bus_reconnected", now)
            for choice in stream.choices.values():
                choice.last_token_at = min(
                    choice.last_token_at, now - TOKEN_TIMEOUT_S + RESEND_RETRY_S
                )

    # ── workers ──────────────────────────────────────────────────────────────────────────────────

    def on_token_batch(self, batch: TokenBatch, now: float) -> None:
        for entry in batch.entries:
            stream = self._by_placement.get(entry.placement_id)
            if (
                stream is not None
                and stream.offer is not None
                and stream.offer.is_of(entry.placement_id)
            ):
                self._accept_offered(stream, stream.offer, batch.worker_id, entry, now)
            elif stream is not None:
                if stream.last_worker_id == batch.worker_id:
                    self._accept(stream, entry, now)
            elif entry.placement_id in self._retired:
                self._answer_retired(batch.worker_id, entry.placement_id, now)
            else:
                self._early_of(batch.worker_id).add(batch.worker_id, entry, now)

    def _early_of(self, worker_id: str) -> EarlyEntries:
        return self._early_of_sites if is_at_site(worker_id) else self._early

    def on_resent(self, resend: ResendTokens, batch: TokenBatch, now: float) -> None:
        stream = self._by_placement.get(resend.placement_id)
        if stream is None or stream.placement is None:
            return
        stream.placement.resends.discard(resend.choice_index)
        stream.placement.num_failed_resends.clear()
        stream.placement.last_token_at = now
        stream.choices[resend.choice_index].last_token_at = now
        self.on_token_batch(batch, now)

    def on_resend_failed(
        self, resend: ResendTokens, error: HearthError, now: float, *, is_bus_trusted: bool
    ) -> None:
        """Requests another resend or resubmits. Failures count only while the bus is trusted:
        faults of the bus do not implicate the worker.
        """
        stream = self._by_placement.get(resend.placement_id)
        if stream is None or stream.placement is None:
            return
        placement, index = stream.placement, resend.choice_index
        placement.resends.discard(index)
        choice = stream.choices[index]
        if choice.is_finished:  # it finished meanwhile; a worker drops a stopped choice
            return
        if isinstance(error, UnknownPlacement):
            self._resubmit(stream, "placement_unknown", now)
            return
        choice.last_token_at = now - TOKEN_TIMEOUT_S + RESEND_RETRY_S
        if is_bus_trusted:
            placement.num_failed_resends[index] += 1
        if placement.num_failed_resends[index] >= MAX_FAILED_RESENDS:
            worker_id = placement.worker_id
            self._resubmit(
                stream, "resends_failed", now, excluded=excluded_after_silence(worker_id)
            )

    def on_worker_lost(self, worker_id: str, now: float, *, is_excluded: bool) -> None:
        """Resubmits the worker's requests. `is_excluded` is false for a restarted worker."""
        excluded = excluded_after_silence(worker_id) if is_excluded else None
        for stream in list(self._by_placement.values()):
            if stream.offer is not None and stream.offer.is_at(worker_id):
                self._decline(stream, now)
            if stream.placement is not None and stream.placement.worker_id == worker_id:
                self._resubmit(stream, "worker_lost", now, excluded=excluded)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float, *, is_bus_trusted: bool) -> None:
        """Checks all streams and early entries for timeouts. A stream that raises ends alone."""
        for stream in list(self._by_request.values()):
            try:
                self._watch(stream, now, is_bus_trusted)
            except BaseException as raised:
                item_error(raised)
                with failing_alone("stream_failed", request=stream.request_id):
                    raise
                if stream.request_id in self._by_request:
                    self._end(stream, HearthError("internal error"), "failed", now)
        expired = *self._early.expire(now), *self._early_of_sites.expire(now)
        for placement_id, worker_id in expired:
            self._abort(worker_id, placement_id, "fenced", now)

    def _watch(self, stream: Stream, now: float, is_bus_trusted: bool) -> None:
        if now >= stream.deadline_at:
            error = DeadlineExceeded("the request did not finish before its deadline")
            self._end(stream, error, "deadline", now)
        elif stream.state is StreamState.RUNNING:
            self._watch_running(stream, now)
        elif stream.state is StreamState.QUEUED:
            self._watch_queued(stream, now, is_bus_trusted)
        elif stream.submit_at is not None and now >= stream.submit_at:
            self._submit(stream, now)

    def _watch_running(self, stream: Stream, now: float) -> None:
        if stream.offer is not None and stream.offer.is_overdue(now):
            self._decline(stream, now)
        for choice in stream.choices.values():
            if now - choice.last_token_at >= TOKEN_TIMEOUT_S and not choice.is_finished:
                self._request_again(stream, choice)

    def _watch_queued(self, stream: Stream, now: float, is_bus_trusted: bool) -> None:
        if not is_bus_trusted:
            stream.keepalive_at = now
        elif now - stream.keepalive_at >= KEEPALIVE_LIMIT_S:
            self._resubmit(stream, "scheduler_silent", now)

    # ── transitions ──────────────────────────────────────────────────────────────────────────────

    def _submit(self, stream: Stream, now: float) -> None:
        stream.attempt += 1
        stream.num_tries += 1
        stream.submit_at = None
        message = SubmitRequest(
            request=stream.remaining_request(now),
            attempt=stream.attempt,
            excluded_workers=tuple(sorted(stream.excluded_workers)),
            affinity_key=stream.affinity_key,
            is_queueable=stream.is_queueable or stream.last_worker_id is not None,
        )
        self._actions.submit(message)

    def _open_window(self, stream: Stream, now: float) -> None:
        stream.window_opened_at = now
        window_s = recovery_window_s(stream.last_worker_id)
        stream.give_up_at = now + (window_s if stream.is_recovering else SUBMIT_WINDOW_S)
        stream.num_tries = 0

    def _queue(self, stream: Stream, scheduler_id: str, now: float) -> None:
        stream.transition_to(StreamState.QUEUED)
        stream.was_accepted = True
        stream.scheduler_id = scheduler_id
        stream.keepalive_at = now
        stream.submit_at = None

    def _run(self, stream: Stream, placed: Placed, now: float) -> None:
        stream.transition_to(StreamState.RUNNING)
        stream.was_accepted = True
        stream.scheduler_id = None
        stream.submit_at = None
        stream.placement = CurrentPlacement(
            placed.placement_id, placed.worker_id, last_token_at=now
        )
        stream.last_worker_id = placed.worker_id
        stream.tries[-1].record_placed(placed, now)
        if placed.has_unlike_prefill:
            self._actions.report(ReportUnlikePrefill(stream.request_id, placed.worker_id))
        self._by_placement[placed.placement_id] = stream
        for choice in stream.choices.values():
            choice.last_token_at = now
        early = self._early_of(placed.worker_id)
        for entry in early.take(placed.placement_id, placed.worker_id):
            if stream.placement is not None:
                self._accept(stream, entry, now)

    def _resubmit(
        self,
        stream: Stream,
        cause: ResubmissionCause,
        now: float,
        *,
        excluded: str | None = None,
    ) -> None:
        """Cancels the queue entry or placement, and submits the request again with all tokens
        received.
        """
        self._leave(stream, "superseded", now)
        stream.tries[-1].end(cause, now)
        if was_at_site(stream.tries[-1]):  # a worker of this site may be the only other one
            stream.excluded_workers.clear()
        if excluded is not None:
            stream.excluded_workers.add(excluded)
        if not stream.budget.take(stream.tries[-1], cause):
            error = NoCapacity("the request was resubmitted too often", retry_after_s=1.0)
            self._end(stream, error, "failed", now)
            return
        for choice in stream.choices.values():
            if not choice.is_finished:
                self._restart(stream, choice)
        if stream.is_finished:
            self._complete(stream, "superseded", now)
            return
        if stream.has_tokens or cause == "regions_changed":
            stream.first_attempt = stream.attempt + 1
        stream.num_resubmissions += 1
        stream.tries.append(TryRecord(len(stream.tries) + 1, now))
        self._actions.report(ReportResubmission(stream.request_id, cause, stream.last_worker_id))
        if stream.state is not StreamState.SUBMITTING:
            stream.transition_to(StreamState.SUBMITTING)
        self._open_window(stream, now)
        self._submit(stream, now)

    def _restart(self, stream: Stream, choice: ChoiceTokens) -> None:
        """Restarts a choice, or finishes it with "length" if it has `max_tokens` tokens."""
        choice.restart()
        if len(choice.token_ids) >= stream.request.sampling.max_tokens:
            served = choice.served or Served(num_cached_tokens=0, prefill_worker_id=None)
            choice.finish = Finish(reason="length", served=served)
            stream.receiver.on_finish(choice.choice_index, choice.finish)

    def _accept(self, stream: Stream, entry: TokenEntry, now: float) -> None:
        choice, placement = stream.choices.get(entry.choice_index), stream.placement
        if choice is None or placement is None:
            return
        placement.last_token_at = choice.last_token_at = now
        placement.is_waiting = entry.is_waiting
        if entry.is_waiting:
            self._ask(stream, now)
        elif stream.offer is not None and entry.token_ids:
            self._decline(stream, now)
        if choice.is_finished:
            self._stop_again(placement, choice, entry, now)
            return
        fault = _fault_of(entry, stream)
        if fault is not None:
            self._leave_failed(stream, HearthError(fault), placement.worker_id, now)
            return
        if entry.token_ids and stream.num_resubmissions:
            stream.record_move(now)
        self._send(stream, choice, entry)
        if stream.receiver.failure is not None:
            self._end(stream, stream.receiver.failure, "failed", now)
            return
        served = entry.served if entry.finish is None else entry.finish.served
        if entry.token_ids or (entry.finish is not None and entry.finish.reason != "failed"):
            stream.tries[-1].record_tokens(
                len(entry.token_ids), served, now, is_counted=entry.finish is not None
            )
            stream.queue.has_output = True
        if choice.finish is not None:
            self._finish(stream, choice, choice.finish, now)
        elif choice.is_stopped:
            self._stop(stream, choice, now)
        else:
            if choice.has_gap:
                self._request_again(stream, choice)
            return
        if stream.state is StreamState.RUNNING and stream.is_finished:
            self._complete(stream, "stop", now)

    def _send(self, stream: Stream, choice: ChoiceTokens, entry: TokenEntry) -> None:
        receiver, index = stream.receiver, choice.choice_index
        if entry.served is not None:
            choice.served = entry.served
            receiver.on_served(index, entry.served)
        if entry.prompt_logprobs:
            receiver.on_prompt_logprobs(entry.prompt_logprobs)
        token_ids, logprobs = choice.accept(entry)
        if token_ids and choice.served is not None:
            self._record_numerics(stream, choice.served.numerics)
        if token_ids and not receiver.on_tokens(index, token_ids, logprobs):
            choice.is_stopped = True

    def _record_numerics(self, stream: Stream, numerics: Numerics | None) -> None:
        before, stream.numerics = stream.numerics, numerics
        if before is not None and numerics is not None and before != numerics:
            report = ReportNumericsChange(
                stream.request_id, stream.last_worker_id, before=before, after=numerics
            )
            self._actions.report(report)

    def _stop(self, stream: Stream, choice: ChoiceTokens, now: float) -> None:
        """Aborts only this choice; after the last choice, `_end` aborts the whole placement."""
        if stream.placement is None:
            return
        stream.placement.stopped_at[choice.choice_index] = now
        if not stream.is_finished:
            self._abort_choice(stream.placement, choice)

    def _stop_again(
        self, placement: CurrentPlacement, choice: ChoiceTokens, entry: TokenEntry, now: float
    ) -> None:
        """Repeats the abort, every ANSWER_EVERY_S, while a stopped choice still sends tokens."""
        stopped_at = placement.stopped_at.get(choice.choice_index)
        if stopped_at is None or entry.finish is not None or now - stopped_at < ANSWER_EVERY_S:
            return
        placement.stopped_at[choice.choice_index] = now
        self._abort_choice(placement, choice)

    def _abort_choice(self, placement: CurrentPlacement, choice: ChoiceTokens) -> None:
        worker_id, placement_id = placement.worker_id, placement.placement_id
        self._actions.abort(worker_id, placement_id, "stop", choice.choice_index)

    def _finish(self, stream: Stream, choice: ChoiceTokens, finish: Finish, now: float) -> None:
        if finish.reason != "failed":
            stream.receiver.on_finish(choice.choice_index, finish)
            return
        if choice.is_stopped:
            return
        error = HearthError("the worker failed")
        if finish.failure is not None:
            error = error_of(finish.failure)
        worker_id = None if stream.placement is None else stream.placement.worker_id
        if isinstance(error, StepFailed):
            self._move_after_failed_step(stream, worker_id, now)
        elif isinstance(error, OutOfMemory):
            self._move_after_out_of_memory(stream, error, worker_id, now)
        elif isinstance(error, ContextFull):
            self._resubmit(stream, "context_full", now, excluded=worker_id)
        elif isinstance(error, (*_TRANSIENT, *_PATIENT)):
            self._resubmit(stream, "worker_failed", now, excluded=worker_id)
        elif isinstance(error, _OF_ONE_CHOICE):
            choice.error = error
        elif isinstance(error, RequestBreaksWorkers):
            self._end(stream, error, "failed", now)
        else:
            self._leave_failed(stream, error, worker_id, now)

    def _leave_failed(
        self, stream: Stream, error: HearthError, worker_id: str | None, now: float
    ) -> None:
        """Ends a request whose worker failed it. One at another site goes on elsewhere: that site
        may have another release or other rules, and says nothing about the request.
        """
        if worker_id is not None and is_at_site(worker_id):
            self._resubmit(stream, "worker_failed", now, excluded=worker_id)
        else:
            self._end(stream, error, "failed", now)

    def _move_after_failed_step(self, stream: Stream, worker_id: str | None, now: float) -> None:
        """Resubmits to another worker, or ends the request: one that makes steps fail must not be
        run by every worker of the fleet.
        """
        stream.num_failed_steps += 1
        if stream.num_failed_steps < MAX_FAILED_STEPS:
            self._resubmit(stream, "step_failed", now, excluded=worker_id)
            return
        self._actions.report(ReportBrokenSteps(stream.request_id, stream.request.tenant_id))
        error = RequestBreaksWorkers(
            f"steps raised {MAX_FAILED_STEPS} times for this request alone"
        )
        self._end(stream, error, "failed", now)

    def _move_after_out_of_memory(
        self, stream: Stream, error: OutOfMemory, worker_id: str | None, now: float
    ) -> None:
        """Resubmits once, to another worker if there is one, which may have more memory."""
        stream.num_out_of_memory += 1
        if stream.num_out_of_memory < MAX_OUT_OF_MEMORY:
            self._resubmit(stream, "worker_failed", now, excluded=worker_id)
        else:
            self._end(stream, error, "failed", now)

    def _complete(self, stream: Stream, reason: AbortReason, now: float) -> None:
        """Ends a stream whose choices have all ended. OpenAI's choices have no error: if only some
        failed, these finish with "failed", which the receiver shows as cut off.
        """
        failed = [each for each in stream.choices.values() if each.error is not None]
        if len(failed) == len(stream.choices):
            self._end(stream, failed[0].error, "failed", now)
            return
        for choice in failed:
            if choice.finish is not None:
                stream.receiver.on_finish(choice.choice_index, choice.finish)
        self._end(stream, None, reason, now)

    def _end(
        self, stream: Stream, error: HearthError | None, reason: AbortReason, now: float
    ) -> None:
        self._leave(stream, reason, now)
        stream.transition_to(StreamState.ENDED)
        del self._by_request[stream.request_id]
        stream.tries[-1].end("finished" if error is None else error.code, now)
        outputs = tuple(each.token_ids for each in stream.choices.values())
        tries = tuple(stream.tries)
        stream.receiver.on_end(
            StreamEnd(error, stream.last_worker_id, stream.num_resubmissions, tries, outputs)
        )
        if error is not None:
            self._end_waiting(stream.queue.take_all(), error)
        self._open_after(stream, now)

    def _open_after(self, stream: Stream, now: float) -> None:
        """Opens another request of the ended one's tenant, and one more while the gateway has
        capacity: it may have been nearly full when the response began.
        """
        queue, tenant = stream.queue, stream.queue.tenant
        queue.ended()
        for _ in range(2 if self._num_free() > 1 else 1):
            found = tenant.next_after(queue)
            if found is not None:
                self._open_next(found, now)
        if not tenant.num_open:
            self._tenants.pop(stream.request.tenant_id, None)

    def _end_waiting(self, openings: Sequence[Opening], error: HearthError) -> None:
        for each in openings:
            del self._waiting[each.request_id]
        _end_unopened(openings, error)

    def _leave(self, stream: Stream, reason: AbortReason, now: float) -> None:
        """Cancels the stream at its scheduler, and acknowledges or aborts it at its worker."""
        if stream.state is StreamState.QUEUED and stream.scheduler_id is not None:
            self._actions.cancel(stream.scheduler_id, stream.request_id, stream.attempt)
        stream.scheduler_id = None
        if stream.offer is not None:
            self._decline(stream, now)
        is_complete = stream.has_every_ending
        placement, stream.placement = stream.placement, None
        if placement is None:
            return
        del self._by_placement[placement.placement_id]
        if is_complete:
            self._retired.add(placement.placement_id, is_finished=True, now=now)
            self._actions.acknowledge(placement.worker_id, placement.placement_id)
        else:
            self._abort(placement.worker_id, placement.placement_id, reason, now)

    # ── moves ────────────────────────────────────────────────────────────────────────────────────

    def _ask(self, stream: Stream, now: float) -> None:
        """Asks for another worker for a request that has waited for long."""
        placement = stream.placement
        if placement is None or stream.offer is not None:
            return
        if not stream.move_times.is_due(stream.paused_at, now):
            return
        stream.attempt += 1
        stream.offer = MoveOffer(stream.attempt, now)
        message = SubmitRequest(
            request=stream.remaining_request(now),
            attempt=stream.attempt,
            excluded_workers=tuple(sorted({*stream.excluded_workers, placement.worker_id})),
            affinity_key=stream.affinity_key,
            is_queueable=False,
            is_move=True,
        )
        self._actions.submit(message)

    def _take_offer(self, stream: Stream, placed: Placed, now: float) -> None:
        """Takes in that another worker has the request, and has not begun with it."""
        offer, placement_id = stream.offer, placed.placement_id
        assert offer is not None
        is_known = placement_id in self._retired or placement_id in self._by_placement
        is_excluded = placed.worker_id in stream.excluded_workers
        if is_known or is_excluded or placed.needs != stream.request.needs:
            if placement_id not in self._by_placement:
                self._abort(placed.worker_id, placement_id, "superseded", now)
            self._decline(stream, now)
            return
        offer.placed, offer.placed_at = placed, now
        self._by_placement[placement_id] = stream
        early = self._early_of(placed.worker_id)
        for entry in early.take(placement_id, placed.worker_id):
            if stream.offer is offer:
                self._accept_offered(stream, offer, placed.worker_id, entry, now)
            elif stream.placement is not None and placement_id in self._by_placement:
                self._accept(stream, entry, now)

    def _accept_offered(
        self, stream: Stream, offer: MoveOffer, worker_id: str, entry: TokenEntry, now: float
    ) -> None:
        """Moves the request with the first output of the offered worker."""
        if offer.placed is None or worker_id != offer.placed.worker_id:
            return
        has_failed = entry.finish is not None and entry.finish.reason == "failed"
        if has_failed:
            self._decline(stream, now)
        elif entry.token_ids or entry.finish is not None or entry.prompt_logprobs:
            self._move(stream, offer, offer.placed, now)
            self._accept(stream, entry, now)

    def _move(self, stream: Stream, offer: MoveOffer, placed: Placed, now: float) -> None:
        stream.offer = None
        self._leave(stream, "superseded", now)
        stream.tries[-1].end("no_room", offer.asked_at)
        stream.move_times.moved()
        stream.num_resubmissions += 1
        stream.first_attempt = offer.attempt
        self._actions.report(
            ReportResubmission(stream.request_id, "no_room", stream.last_worker_id)
        )
        for choice in stream.choices.values():
            if not choice.is_finished:
                choice.restart()
                choice.last_token_at = now
        stream.tries.append(TryRecord(len(stream.tries) + 1, offer.asked_at))
        stream.tries[-1].record_placed(placed, offer.placed_at)
        stream.placement = CurrentPlacement(
            placed.placement_id, placed.worker_id, last_token_at=now
        )
        stream.last_worker_id = placed.worker_id

    def _decline(self, stream: Stream, now: float) -> None:
        """Gives up an offer: the request stays, or goes elsewhere."""
        offer, stream.offer = stream.offer, None
        if offer is None:
            return
        stream.move_times.rejected(now)
        if offer.placed is not None:
            del self._by_placement[offer.placed.placement_id]
            self._abort(offer.placed.worker_id, offer.placed.placement_id, "superseded", now)
        elif offer.scheduler_id is not None:
            self._actions.cancel(offer.scheduler_id, stream.request_id, offer.attempt)

    # ── messages ─────────────────────────────────────────────────────────────────────────────────

    def _request_again(self, stream: Stream, choice: ChoiceTokens) -> None:
        placement = stream.placement
        if placement is None or choice.choice_index in placement.resends:
            return
        placement.resends.add(choice.choice_index)
        message = ResendTokens(
            placement_id=placement.placement_id,
            choice_index=choice.choice_index,
            from_position=len(choice.token_ids),
            region_class=stream.request.region_class,
        )
        self._actions.resend(placement.worker_id, message)

    def _answer_retired(self, worker_id: str, placement_id: bytes, now: float) -> None:
        is_finished = self._retired.due_answer(placement_id, now)
        if is_finished is True:
            self._actions.acknowledge(worker_id, placement_id)
        elif is_finished is False:
            self._abort(worker_id, placement_id, "fenced", now)

    def _abort(self, worker_id: str, placement_id: bytes, reason: AbortReason, now: float) -> None:
        self._retired.add(placement_id, is_finished=False, now=now)
        self._actions.abort(worker_id, placement_id, reason)


def _end_unopened(openings: Sequence[Opening], error: HearthError) -> None:
    for each in openings:
        GuardedReceiver(each.receiver, each.request_id).on_end(StreamEnd(error, None, 0))


def _lacks_worker_again(stream: Stream, error: HearthError, now: float) -> bool:
    """Whether the last failure was NoCapacity too, less than NEXT_LACK_S ago: each try waits for a
    worker in a queue, and such tries share a window.
    """
    if not isinstance(error, NoCapacity) or error.retry_after_s == 0:  # 0: its scheduler stops
        return False
    before, stream.lacked_worker_at = stream.lacked_worker_at, now
    return now - before < NEXT_LACK_S


def _is_present(failed: PlacementFailed, stream: Stream) -> bool:
    """Whether `failed` is about the attempt that the stream waits for. A queued stream compares the
    scheduler, since an earlier attempt may be the queued one (late reply, then a keepalive).
    """
    if stream.state is StreamState.QUEUED:
        return failed.scheduler_id == stream.scheduler_id
    return stream.state is StreamState.SUBMITTING and failed.attempt == stream.attempt


def _fault_of(entry: TokenEntry, stream: Stream) -> str | None:
    """Returns the violation of the protocol in `entry`, which could take unbounded
    memory, or None.
    """
    if len(entry.logprobs) != (len(entry.token_ids) if stream.has_logprobs else 0):
        return "the worker sent tokens without their logprobs"
    if entry.first_position + len(entry.token_ids) > stream.request.sampling.max_tokens:
        return "the worker sent more tokens than max_tokens"
    return None
