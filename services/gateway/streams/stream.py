"""The gateway's state of one request, which survives the loss of workers and schedulers.

    submitting ──Queued, QueueKeepalive──▶ queued ──Placed──▶ running ──last Finish──▶ ended
        │ ▲                                 │  │               │  │
        │ └────── keepalive missing ────────┘  │               │  │
        │ └── worker lost, placement unknown, retryable Finish─┘  │
        └── rejected, deadline, client gone, budget spent ────────┴──────────────────▶ ended

`Placed` may overtake `Queued`: submitting ──Placed──▶ running. `ended` is entered once.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from services.gateway.streams.choice_tokens import ChoiceTokens
from services.gateway.streams.moves import MoveOffer, MoveTimes
from services.gateway.streams.queued_openings import Opening, QueuedOpenings
from services.gateway.streams.receiver import GuardedReceiver
from services.gateway.streams.resubmissions import ResubmissionBudget
from services.gateway.streams.try_record import TryRecord, move_of
from shared.errors import HearthError
from shared.messages import Choice, Placed, Request
from shared.numerics import Numerics
from shared.packing import pack_token_ids, unpack_token_ids


class StreamState(Enum):
    SUBMITTING = "submitting"
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


TRANSITIONS: dict[StreamState, frozenset[StreamState]] = {
    StreamState.SUBMITTING: frozenset({StreamState.QUEUED, StreamState.RUNNING, StreamState.ENDED}),
    StreamState.QUEUED: frozenset({StreamState.SUBMITTING, StreamState.RUNNING, StreamState.ENDED}),
    StreamState.RUNNING: frozenset({StreamState.SUBMITTING, StreamState.ENDED}),
    StreamState.ENDED: frozenset(),
}


class IllegalTransition(HearthError):
    pass


@dataclass(slots=True)
class CurrentPlacement:
    placement_id: bytes
    worker_id: str
    last_token_at: float
    resends: set[int] = field(default_factory=set)  # choices with a pending resend
    num_failed_resends: Counter[int] = field(default_factory=Counter)  # key: choice index
    stopped_at: dict[int, float] = field(default_factory=dict)  # choices that contain a stop string
    is_waiting: bool = False  # for room at its worker, as the last entry says


class Stream:
    """The state of one request. Times are seconds of the gateway's monotonic clock."""

    def __init__(self, opening: Opening, now: float, *, queue: QueuedOpenings) -> None:
        """`queue` has the requests of the same response."""
        self.request = request = opening.request
        self.affinity_key = opening.affinity_key
        self.is_queueable = opening.is_queueable or queue.has_output
        self.receiver = GuardedReceiver(opening.receiver, request.request_id)
        self.queue = queue
        self._is_later = queue.has_output
        self.deadline_at = now + request.deadline_s
        self.choices = {
            choice.choice_index: ChoiceTokens(
                choice.choice_index, unpack_token_ids(choice.output_token_ids)
            )
            for choice in request.choices
        }
        self.has_logprobs = request.sampling.num_logprobs is not None
        self.state = StreamState.SUBMITTING
        self.attempt = 0
        self.first_attempt = 1  # the first with all tokens received, and the regions of now
        self.num_resubmissions = 0
        self.budget = ResubmissionBudget()
        self.num_failed_steps = 0  # steps with this request alone
        self.num_out_of_memory = 0  # workers whose devices had no memory for it
        self.excluded_workers: set[str] = set()
        self.submit_at: float | None = None  # when the next attempt is due
        self.window_opened_at = now
        self.give_up_at = now
        self.was_accepted = False  # a scheduler has queued or placed the request
        self.num_tries = 0  # tries since `give_up_at` was set
        self.lacked_worker_at = -math.inf  # time of the last NoCapacity in a queue
        self.scheduler_id: str | None = None
        self.keepalive_at = now
        self.placement: CurrentPlacement | None = None
        self.offer: MoveOffer | None = None  # of another worker, while this one has no room
        self.move_times = MoveTimes()
        self.last_worker_id: str | None = None
        self.numerics: Numerics | None = request.numerics  # numerics of the last tokens' worker
        self.tries = [TryRecord(1, now)]

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_recovering(self) -> bool:
        """Whether the client may already have a part of the response."""
        return self.num_resubmissions > 0 or self._is_later

    @property
    def is_finished(self) -> bool:
        return all(choice.is_finished for choice in self.choices.values())

    @property
    def has_every_ending(self) -> bool:
        """Whether the placement sent every Finish; a choice stopped in the placement sends none."""
        stopped = () if self.placement is None else self.placement.stopped_at
        return all(
            choice.choice_index not in stopped and (choice.is_stopped or choice.finish is not None)
            for choice in self.choices.values()
        )

    def record_move(self, now: float) -> None:
        """Records and reports a move that a token of the current placement ends."""
        move = move_of(self.tries, now)
        if move is not None:
            self.tries[-1].move = move
            self.receiver.on_moved(move)

    @property
    def has_tokens(self) -> bool:
        return any(choice.token_ids for choice in self.choices.values())

    def is_outdated(self, placed: Placed) -> bool:
        """Whether the placement is of a submission that lacked tokens received since. A worker with
        other numerics would continue other ones than these.
        """
        return 0 < placed.attempt < self.first_attempt

    def is_offered(self, attempt: int) -> bool:
        """Whether it has asked for another worker with this attempt, and none is named yet."""
        offer = self.offer
        return offer is not None and offer.attempt == attempt and offer.placed is None

    @property
    def paused_at(self) -> float:
        """The time of the last token of the current try, or of its placement before the first."""
        return max(self.tries[-1].placed_at, self.tries[-1].last_token_at)

    def transition_to(self, state: StreamState) -> None:
        """Changes the state. Raises IllegalTransition, which means a bug in this code, not in a
        peer.
        """
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.request_id}: {self.state.value} to {state.value}")
        self.state = state

    def remaining_request(self, now: float) -> Request:
        """Returns the request with its unfinished choices, their tokens and the remaining time."""
        choices = tuple(
            Choice(
                choice_index=choice.choice_index,
                output_token_ids=pack_token_ids(choice.token_ids),
            )
            for choice in self.choices.values()
            if not choice.is_finished
        )
        # rounding can make the remaining time exceed `deadline_s`
        left_s = min(max(self.deadline_at - now, 0.0), self.request.deadline_s)
        return msgspec.structs.replace(
            self.request, choices=choices, deadline_s=left_s, numerics=self.numerics
        )
