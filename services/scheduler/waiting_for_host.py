"""Requests that no ready worker serves. A worker may return or join, or a host may wake the model.

    ┌──a worker serves it──▶ requeued
waiting ──a host can serve it──▶ waits, until its deadline or until the wake is known to be late
    └──nobody can, for NO_WORKER_GRACE_S or cold_start_s──▶ failed

Each waits in its queue, within the bounds of all queues and until its deadline. `cold_start_s` is
for a model without any worker, which an autoscaler starts.
"""

from __future__ import annotations

from collections.abc import Callable

from services.scheduler.backlog import ModelKey, QueuedRequest
from services.scheduler.candidates import Candidates
from services.scheduler.decode_starts import SILENT_GRACE_S
from services.scheduler.residency.keeper import ResidencyKeeper
from shared.errors import NoCapacity

NO_WORKER_GRACE_S = 2.0


class UnservedRequests:
    def __init__(
        self,
        candidates: Candidates,
        residency: ResidencyKeeper,
        *,
        requeue: Callable[[QueuedRequest], None],
        fail: Callable[[QueuedRequest, Exception], None],
        cold_start_s: float = 0.0,
    ) -> None:
        self._cold_start_s = cold_start_s
        self._candidates, self._residency = candidates, residency
        self._requeue, self._fail = requeue, fail
        self._waiting: dict[QueuedRequest, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting_for_hosts(self) -> list[QueuedRequest]:
        return [each for each in self._waiting if each.waits_for_host and not each.is_removed]

    def add(self, ticket: QueuedRequest, now: float, *, knows_all_workers: bool) -> bool:
        """Adds a ticket. Returns whether it is the first that waits for its model. Raises
        NoCapacity for one that must not wait, or is too long for every worker.
        """
        can_be_served = self._is_hosted(ticket)
        if not ticket.is_queueable:
            if can_be_served:
                raise self._residency.rejection(ticket, now)
            raise self._error(ticket, now)
        is_too_long = knows_all_workers and self._candidates.is_too_long(ticket, now)
        if is_too_long and not can_be_served:
            raise self._candidates.error(ticket, now)
        ticket.unservable_since, ticket.waits_for_host = now, can_be_served
        served = ticket.queue.served
        is_first = not any(e.queue.served == served and not e.is_removed for e in self._waiting)
        self._waiting[ticket] = None
        return is_first

    def retry(self, now: float, served: ModelKey | None = None) -> None:
        """Retries the waiting requests: all, or those for the model `served`."""
        for ticket in list(self._waiting):
            if served is None or ticket.queue.served == served:
                self._retry(ticket, now)

    def _retry(self, ticket: QueuedRequest, now: float) -> None:
        assert ticket.unservable_since is not None
        if ticket.is_removed:
            del self._waiting[ticket]
        elif self._candidates.has_any(ticket, now):
            del self._waiting[ticket]
            ticket.unservable_since, ticket.waits_for_host = None, False
            self._requeue(ticket)
        elif self._is_hosted(ticket):
            ticket.unservable_since, ticket.waits_for_host = now, True
            error = self._residency.error(ticket, now)
            if error is not None:
                self._end(ticket, error)
        elif now >= self._give_up_at(ticket, ticket.unservable_since):
            self._end(ticket, self._error(ticket, now))
        else:
            ticket.waits_for_host = False

    def _is_hosted(self, ticket: QueuedRequest) -> bool:
        """Whether it waits for a host: a live worker that does not reply, or that the request does
        not fit, is none that waking would replace.
        """
        has_worker = self._candidates.has_excluded(ticket)
        return not has_worker and self._residency.can_serve(ticket)

    def _error(self, ticket: QueuedRequest, now: float) -> NoCapacity:
        has_worker = self._candidates.has_excluded(ticket)
        failure = None if has_worker else self._residency.failure(ticket)
        return self._candidates.error(ticket, now) if failure is None else failure

    def _end(self, ticket: QueuedRequest, error: Exception) -> None:
        del self._waiting[ticket]
        self._fail(ticket, error)

    def _give_up_at(self, ticket: QueuedRequest, unservable_since: float) -> float:
        if not self._candidates.has_excluded(ticket):
            return unservable_since + max(NO_WORKER_GRACE_S, self._cold_start_s)
        give_up_at = unservable_since + NO_WORKER_GRACE_S
        if ticket.silent_since is None:
            return give_up_at
        return min(give_up_at, ticket.silent_since + SILENT_GRACE_S)
