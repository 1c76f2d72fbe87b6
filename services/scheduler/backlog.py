"""One queue of the scheduler: its requests, its tenants' shares, and its service rate."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp
from typing import NamedTuple

from services.scheduler.fair_queue import CLASS_WEIGHT, FairQueue, class_of
from shared.messages import ModelCard, Request, SubmitRequest
from shared.numerics import Numerics


class QueueKey(NamedTuple):
    """Identifies a queue. Regions, context, numerics and needs are included, so that a request
    without room on the workers where it may run does not block requests that may run elsewhere.
    Block hashes fit one block size.
    """

    model: str
    revision: str
    block_size: int
    regions: tuple[str, ...] = ()
    context_tokens: int = 0  # the smallest of a live worker that held it when it was queued
    numerics: Numerics | None = None  # the numerics that a resumed output was computed with
    needs: tuple[str, ...] = ()  # features of its workers

    @classmethod
    def of(cls, request: Request, context_tokens: int = 0) -> QueueKey:
        served = request.model, request.revision, request.block_size
        regions, numerics = request.allowed_regions, request.numerics
        return cls(*served, regions, context_tokens, numerics, request.needs)

    @property
    def served(self) -> ModelKey:
        return self.model, self.revision, self.block_size


ModelKey = tuple[str, str, int]  # the model, revision and block size that a worker serves


def model_key(card: ModelCard) -> ModelKey:
    return card.name, card.revision, card.block_size


MIN_RETRY_S = 0.5
MAX_RETRY_S = 60.0
RATE_WINDOW_S = 10.0
MIN_BACKLOG_S = 1.0  # waiting time within the window that makes the rate valid


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A request from its submission to its placement or failure."""

    submit: SubmitRequest
    queue: QueueKey
    sequence_number: int
    num_tokens: int
    queued_at: float
    deadline_at: float
    is_removed: bool = False  # removed: tasks that still process it must stop
    is_placing: bool = False  # popped from the queue
    is_leaving: bool = False  # placed at another site now, or rejected: home is full
    unservable_since: float | None = None  # time since which no live worker serves it
    waits_for_host: bool = False  # waits for a host that can wake the model
    unfit_workers: set[str] = field(default_factory=set)  # workers that replied WorkerUnfit
    silent_since: float | None = None  # when the first start without a reply was sent
    chosen_at: float | None = None  # when the last worker was chosen

    @property
    def request(self) -> Request:
        return self.submit.request

    @property
    def excluded_workers(self) -> set[str]:
        return self.unfit_workers.union(self.submit.excluded_workers)

    @property
    def is_queueable(self) -> bool:
        return self.submit.is_queueable and not self.is_leaving

    @property
    def queue_id(self) -> str:
        return self.request.queue_id

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def weight(self) -> float:
        return self.request.weight


@dataclass(slots=True)
class QueuedTokens:
    num_requests: int = 0
    num_tokens: int = 0

    def add(self, ticket: QueuedRequest, sign: int = 1) -> None:
        self.num_requests += sign
        self.num_tokens += sign * ticket.num_tokens


@dataclass(slots=True)
class ServiceRate:
    """Tokens per second that leave a queue while requests wait in it, decayed over RATE_WINDOW_S.
    Requests placed without a wait count, too: a short wait does not indicate a shortage.
    """

    tokens: float = 0.0
    backlog_s: float = 0.0
    counted_at: float = 0.0

    def advance(self, now: float, *, is_backlogged: bool) -> None:
        elapsed_s = max(0.0, now - self.counted_at)
        decay = exp(-elapsed_s / RATE_WINDOW_S)
        self.tokens *= decay
        self.backlog_s *= decay
        if is_backlogged:
            self.backlog_s += RATE_WINDOW_S * (1.0 - decay)
        self.counted_at = now

    def per_s(self) -> float | None:
        """Returns tokens per second, or None until requests have waited for MIN_BACKLOG_S in the
        window.
        """
        return self.tokens / self.backlog_s if self.backlog_s >= MIN_BACKLOG_S else None


@dataclass(slots=True)
class TenantShareOfQueue:
    """One tenant's requests in a queue."""

    weight: float  # the tenant's weight times its class's
    usage: QueuedTokens = field(default_factory=QueuedTokens)


class Backlog:
    """The requests of one queue."""

    def __init__(self, now: float) -> None:
        self.queue: FairQueue[QueuedRequest] = FairQueue()
        self.rate = ServiceRate(counted_at=now)
        self.usage = QueuedTokens()
        self._shares: dict[str, TenantShareOfQueue] = {}
        self._weight = 0.0

    def advance(self, now: float) -> None:
        """Updates the service rate. Must be called before the queue changes."""
        self.rate.advance(now, is_backlogged=len(self.queue) > 0)

    def add(self, ticket: QueuedRequest) -> None:
        share = self._shares.get(ticket.queue_id)
        if share is None:
            share = self._shares[ticket.queue_id] = TenantShareOfQueue(0.0)
        weight = _weight_of(ticket)
        self._weight += weight - share.weight
        share.weight = weight
        self.usage.add(ticket)
        share.usage.add(ticket)

    def remove(self, ticket: QueuedRequest) -> None:
        self.queue.discard(ticket)
        share = self._shares[ticket.queue_id]
        self.usage.add(ticket, -1)
        share.usage.add(ticket, -1)
        if not share.usage.num_requests:
            self._weight -= share.weight
            del self._shares[ticket.queue_id]

    def wait_s(self, ticket: QueuedRequest) -> float:
        """Returns the seconds until the ticket's turn: its tenant's queued tokens at the tenant's
        share of the rate; 0 if the rate is unknown.
        """
        rate, share = self.rate.per_s(), self._shares.get(ticket.queue_id)
        if not rate or share is None:
            return 0.0
        shared = share.usage.num_tokens * self._weight / _weight_of(ticket)
        return min(self.usage.num_tokens, shared) / rate

    def retry_after_s(self) -> float:
        """Returns the seconds until about half of the held tokens are placed, at the recent
        rate.
        """
        rate = self.rate.per_s()
        if not rate:
            return 1.0 if self.usage.num_requests else MIN_RETRY_S
        return retry_within_limits(self.usage.num_tokens / 2 / rate)


def _weight_of(ticket: QueuedRequest) -> float:
    return float(ticket.weight * CLASS_WEIGHT ** class_of(ticket.priority))


def retry_within_limits(retry_after_s: float) -> float:
    return min(MAX_RETRY_S, max(MIN_RETRY_S, retry_after_s))
