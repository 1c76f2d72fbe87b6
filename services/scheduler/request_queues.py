"""The scheduler's bounded, fair queue with deadlines. Every request leaves it exactly once.

    enqueue ──▶ waiting ──pop──▶ placing ──▶ remove (placed, failed, cancelled, expired, dropped)
                   ▲ └───────────────┼─────────▶ remove
                   └──── requeue ────┘

The bounds count all held requests, in any phase. Requests of one model form a queue: a model
whose workers are full does not delay other models.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from services.scheduler.backlog import (
    Backlog,
    QueuedRequest,
    QueuedTokens,
    QueueKey,
    retry_within_limits,
)
from shared.errors import DeadlineExceeded, InvalidRequest, Overloaded
from shared.messages import CancelQueued, Request, SubmitRequest
from shared.packing import BLOCK_HASH_BYTES, TOKEN_ID_BYTES

# A tenant may hold up to 8 times the remaining capacity (8/9 of the total): others always get some.
# (Choudhury and Hahne, "Dynamic Queue Length Thresholds", 1998.)
TENANT_SHARE = 8
MAX_QUEUES = 16  # includes queues without requests, which retain their service rate


def request_tokens(request: Request) -> int:
    """Returns the maximum cost of a request: its prompt tokens and all tokens that it may
    generate.
    """
    num_prompt_tokens = len(request.prompt_token_ids) // TOKEN_ID_BYTES
    return num_prompt_tokens + request.sampling.max_tokens * len(request.choices)


def num_context_tokens(request: Request) -> int:
    """Returns the number of tokens whose KV the longest choice needs: all but its last token."""
    num_prompt_tokens = len(request.prompt_token_ids) // TOKEN_ID_BYTES
    return num_prompt_tokens + request.sampling.max_tokens - 1


class RequestQueues:
    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self._backlogs: dict[QueueKey, Backlog] = {}
        self._held: dict[str, QueuedRequest] = {}
        self._of_gateway: dict[str, dict[str, QueuedRequest]] = {}
        self._unqueueable: dict[str, QueuedRequest] = {}
        self._usage = QueuedTokens()
        self._usage_of_tenant: dict[str, QueuedTokens] = {}
        self._deadlines: list[tuple[float, int, QueuedRequest]] = []
        self._next_sequence_number = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_tokens(self) -> int:
        return self._usage.num_tokens

    def enqueue(
        self,
        submit: SubmitRequest,
        now: float,
        *,
        context_tokens: int = 0,
        is_bounded: bool = True,
    ) -> QueuedRequest:
        """Queues a request. Raises InvalidRequest, DeadlineExceeded, or Overloaded with a
        retry-after time.

        `context_tokens` is the smallest context of a live worker that holds the request. The
        request replaces a queued one of the same id, whose attempt the gateway has given up. One
        that will not wait here needs no room: it is not `is_bounded`.
        """
        request = submit.request
        _validate(request)
        held = self._held.get(request.request_id)
        if held is not None and held.request.gateway_id != request.gateway_id:
            raise InvalidRequest("another gateway has a request with this id")
        self.remove(request.request_id)
        num_tokens = request_tokens(request)
        number, deadline_at = self._next_sequence_number, now + request.deadline_s
        key = QueueKey.of(request, context_tokens)
        ticket = QueuedRequest(submit, key, number, num_tokens, now, deadline_at)
        backlog = self._backlogs.get(key) or Backlog(now)
        backlog.advance(now)
        if is_bounded:
            self._check_room(ticket, backlog)
            _check_deadline(ticket, backlog)
        self._backlogs.setdefault(key, backlog)
        self._next_sequence_number += 1
        self._hold(ticket, backlog)
        backlog.queue.push(ticket, now)
        return ticket

    def pop(self, now: float, blocked: Collection[QueueKey] = ()) -> QueuedRequest | None:
        """Returns the next request to place, round-robin over the queues."""
        for key, backlog in list(self._backlogs.items()):
            if key in blocked or not len(backlog.queue):
                continue
            backlog.advance(now)
            ticket = backlog.queue.pop(now)
            if ticket is not None:
                ticket.is_placing = True
                self._backlogs[key] = self._backlogs.pop(key)  # moves it to the end
                return ticket
        return None

    def take(self, ticket: QueuedRequest, now: float) -> None:
        """Takes a waiting request out of its turn, to place it."""
        backlog = self._backlogs[ticket.queue]
        backlog.advance(now)
        backlog.queue.discard(ticket)
        ticket.is_placing = True

    def requeue(self, ticket: QueuedRequest, now: float) -> None:
        """Returns the request to its old position, unless the request was removed meanwhile."""
        if not ticket.is_removed:
            ticket.is_placing = False
            backlog = self._backlogs[ticket.queue]
            backlog.advance(now)
            backlog.queue.push_back(ticket, now)

    def placed(self, ticket: QueuedRequest, now: float) -> None:
        backlog = self._backlogs[ticket.queue]
        backlog.advance(now)
        backlog.rate.tokens += ticket.num_tokens
        self._forget(ticket)

    def remove(self, request_id: str) -> QueuedRequest | None:
        ticket = self._held.get(request_id)
        if ticket is not None:
            self._forget(ticket)
        return ticket

    def cancel(self, message: CancelQueued) -> None:
        """Cancels a queued request. Ignores one of another gateway, or of a later attempt."""
        ticket = self._held.get(message.request_id)
        if ticket is None or ticket.request.gateway_id != message.gateway_id:
            return
        if message.attempt is None or ticket.submit.attempt <= message.attempt:
            self._forget(ticket)

    def remove_expired(self, now: float) -> list[QueuedRequest]:
        expired = []
        while self._deadlines and (
            self._deadlines[0][0] <= now or self._deadlines[0][2].is_removed
        ):
            _, _, ticket = heapq.heappop(self._deadlines)
            if not ticket.is_removed:
                self._forget(ticket)
                expired.append(ticket)
        if len(self._deadlines) > 2 * len(self._held) + 64:  # drop those that ended early
            self._deadlines = [each for each in self._deadlines if not each[2].is_removed]
            heapq.heapify(self._deadlines)
        return expired

    def remove_of_gateway(self, gateway_id: str) -> list[QueuedRequest]:
        tickets = list(self._of_gateway.get(gateway_id, {}).values())
        for ticket in tickets:
            self._forget(ticket)
        return tickets

    def must_not_wait(self, queue: QueueKey) -> list[QueuedRequest]:
        """Returns the requests that wait in this queue, and are rejected instead."""
        held = self._unqueueable.values()
        return [each for each in held if each.queue == queue and not each.is_placing]

    def busy(self, queue: QueueKey) -> Overloaded:
        """Returns the error of a request that must not wait, and for which no worker has room."""
        backlog = self._backlogs[queue]
        message = "no worker has room for this request now"
        return Overloaded(message, retry_after_s=backlog.retry_after_s())

    def oldest_wait_s(self, now: float) -> float:
        """Returns the age of the oldest request held, waiting or being placed, or 0 without any."""
        first = next(iter(self._held.values()), None)  # they are in order of arrival
        return 0.0 if first is None else now - first.queued_at

    def has_any(self, queue: QueueKey) -> bool:
        """Whether a request of this queue is held, waiting or being placed."""
        backlog = self._backlogs.get(queue)
        return backlog is not None and backlog.usage.num_requests > 0

    def held(self) -> list[QueuedRequest]:
        return list(self._held.values())

    def request_ids_by_gateway(self) -> dict[str, tuple[str, ...]]:
        return {gateway_id: tuple(held) for gateway_id, held in self._of_gateway.items()}

    def _check_room(self, ticket: QueuedRequest, backlog: Backlog) -> None:
        room = self.max_requests - self._usage.num_requests
        token_room = self.max_tokens - self._usage.num_tokens
        usage = self._usage_of_tenant.get(ticket.queue_id, QueuedTokens())
        if room <= 0 or (ticket.num_tokens > token_room and self._held):
            raise Overloaded("the queue is full", retry_after_s=backlog.retry_after_s())
        over_requests = usage.num_requests >= TENANT_SHARE * room
        if over_requests or usage.num_tokens >= TENANT_SHARE * max(token_room, 1):
            raise Overloaded("this tenant's queue is full", retry_after_s=backlog.retry_after_s())

    def _hold(self, ticket: QueuedRequest, backlog: Backlog) -> None:
        request = ticket.request
        self._held[request.request_id] = ticket
        if not ticket.is_queueable:
            self._unqueueable[request.request_id] = ticket
        self._of_gateway.setdefault(request.gateway_id, {})[request.request_id] = ticket
        self._usage.add(ticket)
        self._usage_of_tenant.setdefault(request.queue_id, QueuedTokens()).add(ticket)
        heapq.heappush(self._deadlines, (ticket.deadline_at, ticket.sequence_number, ticket))
        backlog.add(ticket)

    def _forget(self, ticket: QueuedRequest) -> None:
        ticket.is_removed = True
        request = ticket.request
        del self._held[request.request_id]
        self._unqueueable.pop(request.request_id, None)
        of_gateway = self._of_gateway[request.gateway_id]
        del of_gateway[request.request_id]
        if not of_gateway:
            del self._of_gateway[request.gateway_id]
        usage = self._usage_of_tenant[request.queue_id]
        self._usage.add(ticket, -1)
        usage.add(ticket, -1)
        if not usage.num_requests:
            del self._usage_of_tenant[request.queue_id]
        backlog = self._backlogs[ticket.queue]
        backlog.remove(ticket)
        if not backlog.usage.num_requests and len(self._backlogs) > MAX_QUEUES:
            del self._backlogs[ticket.queue]


def _check_deadline(ticket: QueuedRequest, backlog: Backlog) -> None:
    """Rejects a request whose expected wait exceeds its deadline. Raises Overloaded."""
    wait_s, deadline_s = backlog.wait_s(ticket), ticket.request.deadline_s
    if wait_s > deadline_s:
        raise Overloaded(
            f"the wait is about {wait_s:.1f} s, longer than the deadline of {deadline_s:.1f} s",
            retry_after_s=retry_within_limits(wait_s - deadline_s),
        )


def _validate(request: Request) -> None:
    if not request.prompt_token_ids or len(request.prompt_token_ids) % TOKEN_ID_BYTES:
        raise InvalidRequest("prompt_token_ids must be one or more complete token ids")
    if len(request.block_hashes) % BLOCK_HASH_BYTES:
        raise InvalidRequest("block_hashes must be complete 128-bit digests")
    if any(len(choice.output_token_ids) % TOKEN_ID_BYTES for choice in request.choices):
        raise InvalidRequest("output_token_ids must be complete token ids")
    if not request.choices or request.sampling.max_tokens < 1:
        raise InvalidRequest("a request needs a choice and max_tokens of at least 1")
    if request.deadline_s <= 0:
        raise DeadlineExceeded("the deadline has passed")
