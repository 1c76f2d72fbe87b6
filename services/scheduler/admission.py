"""What a scheduler holds: bounded, fair, with deadlines; every request leaves it exactly once.

    enqueue ──▶ waiting ──pop──▶ placing ──▶ remove (placed, failed, cancelled, expired, dropped)
                   ▲ └───────────────┼─────────▶ remove
                   └──── requeue ────┘

The bounds count whatever is held, in any phase. Requests of one model form a lane, so that a model
whose workers are full does not hold up the others.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from services.scheduler.fair_queue import FairQueue
from shared.errors import DeadlineExceeded, InvalidRequest, Overloaded
from shared.messages import Request, SubmitRequest
from shared.packing import BLOCK_HASH_BYTES, TOKEN_ID_BYTES

Lane = tuple[str, str]  # model, revision

# A tenant may hold up to 8 times the room that is left, 8/9 of all: the others always find some.
# (Choudhury and Hahne, "Dynamic Queue Length Thresholds", 1998.)
TENANT_SHARE = 8
MIN_RETRY_S = 0.5
MAX_RETRY_S = 60.0
RATE_WINDOW_S = 10.0


@dataclass(eq=False, slots=True)
class Ticket:
    """A request from its submission to its placement or failure."""

    submit: SubmitRequest
    sequence_number: int
    num_tokens: int
    queued_at: float
    deadline_at: float
    is_gone: bool = False  # removed: whoever still works on it must stop
    unservable_since: float | None = None  # no live worker could take it

    @property
    def request(self) -> Request:
        return self.submit.request

    @property
    def tenant_id(self) -> str:
        return self.request.tenant_id

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def lane(self) -> Lane:
        return self.request.model, self.request.revision


@dataclass(slots=True)
class _Usage:
    num_requests: int = 0
    num_tokens: int = 0

    def add(self, ticket: Ticket, sign: int = 1) -> None:
        self.num_requests += sign
        self.num_tokens += sign * ticket.num_tokens


@dataclass(slots=True)
class _Rate:
    """Tokens a second that left the queue for a worker, forgotten over RATE_WINDOW_S."""

    tokens: float = 0.0
    counted_at: float = 0.0

    def count(self, num_tokens: int, now: float) -> None:
        kept = max(0.0, 1.0 - (now - self.counted_at) / RATE_WINDOW_S)
        self.tokens = self.tokens * kept + num_tokens
        self.counted_at = now

    def per_s(self) -> float:
        return self.tokens / RATE_WINDOW_S


def request_tokens(request: Request) -> int:
    """What a request may cost: its prompt and all that it may make."""
    num_prompt_tokens = len(request.prompt_token_ids) // TOKEN_ID_BYTES
    return num_prompt_tokens + request.sampling.max_tokens * len(request.choices)


@dataclass
class Admission:
    max_requests: int
    max_tokens: int
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lanes: dict[Lane, FairQueue[Ticket]] = {}
        self._num_in_lane: Counter[Lane] = Counter()
        self._held: dict[str, Ticket] = {}
        self._of_gateway: dict[str, dict[str, Ticket]] = {}
        self._usage = _Usage()
        self._usage_of_tenant: dict[str, _Usage] = {}
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._rate = _Rate()
        self._next_sequence_number = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_tokens(self) -> int:
        return self._usage.num_tokens

    def enqueue(self, submit: SubmitRequest, now: float) -> Ticket:
        """Raises InvalidRequest, DeadlineExceeded, or Overloaded with a time to retry after.

        A request that is held already is replaced: its gateway has given up the earlier try.
        """
        request = submit.request
        _validate(request)
        self.remove(request.request_id)
        num_tokens = request_tokens(request)
        self._check_room(request.tenant_id, num_tokens)
        sequence_number = self._next_sequence_number
        self._next_sequence_number += 1
        ticket = Ticket(submit, sequence_number, num_tokens, now, now + request.deadline_s)
        self._held[request.request_id] = ticket
        self._of_gateway.setdefault(request.gateway_id, {})[request.request_id] = ticket
        self._usage.add(ticket)
        self._usage_of_tenant.setdefault(request.tenant_id, _Usage()).add(ticket)
        heapq.heappush(self._deadlines, (ticket.deadline_at, sequence_number, ticket))
        if ticket.lane not in self._lanes:
            self._lanes[ticket.lane] = FairQueue(self.weights)
        self._lanes[ticket.lane].push(ticket)
        self._num_in_lane[ticket.lane] += 1
        return ticket

    def pop(self, blocked: Collection[Lane] = ()) -> Ticket | None:
        """The next to place; lanes take turns."""
        for lane, queue in list(self._lanes.items()):
            if lane in blocked:
                continue
            ticket = queue.pop()
            if ticket is not None:
                self._lanes[lane] = self._lanes.pop(lane)  # to the end
                return ticket
        return None

    def requeue(self, ticket: Ticket) -> None:
        """Back to its old place, unless it was removed meanwhile."""
        if not ticket.is_gone:
            self._lanes[ticket.lane].push_back(ticket)

    def placed(self, ticket: Ticket, now: float) -> None:
        self._rate.count(ticket.num_tokens, now)
        self._forget(ticket)

    def ticket_of(self, request_id: str) -> Ticket | None:
        return self._held.get(request_id)

    def remove(self, request_id: str) -> Ticket | None:
        ticket = self._held.get(request_id)
        if ticket is not None:
            self._forget(ticket)
        return ticket

    def remove_expired(self, now: float) -> list[Ticket]:
        expired = []
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].is_gone):
            _, _, ticket = heapq.heappop(self._deadlines)
            if not ticket.is_gone:
                self._forget(ticket)
                expired.append(ticket)
        if len(self._deadlines) > 2 * len(self._held) + 64:  # let go of those that ended early
            self._deadlines = [each for each in self._deadlines if not each[2].is_gone]
            heapq.heapify(self._deadlines)
        return expired

    def remove_of_gateway(self, gateway_id: str) -> list[Ticket]:
        tickets = list(self._of_gateway.get(gateway_id, {}).values())
        for ticket in tickets:
            self._forget(ticket)
        return tickets

    def held(self) -> list[Ticket]:
        return list(self._held.values())

    def request_ids_by_gateway(self) -> dict[str, tuple[str, ...]]:
        return {gateway_id: tuple(held) for gateway_id, held in self._of_gateway.items()}

    def retry_after_s(self) -> float:
        """How long until about half of what is held has been placed, at the recent rate."""
        rate = self._rate.per_s()
        if rate == 0:
            return MIN_RETRY_S if not self._held else 1.0
        return min(MAX_RETRY_S, max(MIN_RETRY_S, self._usage.num_tokens / 2 / rate))

    def _check_room(self, tenant_id: str, num_tokens: int) -> None:
        room = self.max_requests - self._usage.num_requests
        token_room = self.max_tokens - self._usage.num_tokens
        usage = self._usage_of_tenant.get(tenant_id, _Usage())
        if room <= 0 or (num_tokens > token_room and self._held):
            raise Overloaded("the queue is full", retry_after_s=self.retry_after_s())
        over_requests = usage.num_requests >= TENANT_SHARE * room
        if over_requests or usage.num_tokens >= TENANT_SHARE * max(token_room, 1):
            raise Overloaded("this tenant's queue is full", retry_after_s=self.retry_after_s())

    def _forget(self, ticket: Ticket) -> None:
        ticket.is_gone = True
        request = ticket.request
        del self._held[request.request_id]
        of_gateway = self._of_gateway[request.gateway_id]
        del of_gateway[request.request_id]
        if not of_gateway:
            del self._of_gateway[request.gateway_id]
        usage = self._usage_of_tenant[request.tenant_id]
        self._usage.add(ticket, -1)
        usage.add(ticket, -1)
        if not usage.num_requests:
            del self._usage_of_tenant[request.tenant_id]
        self._lanes[ticket.lane].discard(ticket)
        self._num_in_lane[ticket.lane] -= 1
        if not self._num_in_lane[ticket.lane]:  # what is being placed may come back
            del self._lanes[ticket.lane], self._num_in_lane[ticket.lane]


def _validate(request: Request) -> None:
    if not request.prompt_token_ids or len(request.prompt_token_ids) % TOKEN_ID_BYTES:
        raise InvalidRequest("prompt_token_ids must be a whole, positive number of token ids")
    if len(request.block_hashes) % BLOCK_HASH_BYTES:
        raise InvalidRequest("block_hashes must be whole 128-bit digests")
    if any(len(choice.output_token_ids) % TOKEN_ID_BYTES for choice in request.choices):
        raise InvalidRequest("output_token_ids must be a whole number of token ids")
    if not request.choices or request.sampling.max_tokens < 1:
        raise InvalidRequest("a request needs a choice and max_tokens of at least 1")
    if request.deadline_s <= 0:
        raise DeadlineExceeded("the deadline has passed")
