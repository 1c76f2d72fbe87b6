"""When a request that waits for room at its worker asks for another one. No I/O.

    running ──waits for MIN_PAUSE_S──▶ asks ──Placed──▶ offered ──its first token──▶ moved
       ▲                                │ no room elsewhere │ failed, lost, silent
       └──a token of the present worker─┴───────────────────┘

The request stays where it is until another worker has sent a token: until then it has its place in
the order of the present worker, and whichever is first continues it. Each move doubles the pause
before the next one, so that two full workers do not pass a request to and fro.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from shared.messages import Placed

MIN_PAUSE_S = 2.0  # as long as its worker may be silent: room is often found before
MAX_MOVES = 8
RETRY_S, MAX_RETRY_S = 1.0, 4.0  # after an offer that came to nothing, doubled
MAX_OFFER_S = 15.0  # until the first token


@dataclass(slots=True)
class MoveOffer:
    """Another placement of a running request, asked for with a submission."""

    attempt: int
    asked_at: float
    scheduler_id: str | None = None  # has queued the submission
    placed: Placed | None = None
    placed_at: float = 0.0

    def is_of(self, placement_id: bytes) -> bool:
        return self.placed is not None and self.placed.placement_id == placement_id

    def is_at(self, worker_id: str) -> bool:
        return self.placed is not None and self.placed.worker_id == worker_id

    def is_overdue(self, now: float) -> bool:
        return now - self.asked_at >= MAX_OFFER_S


class MoveTimes:
    def __init__(self) -> None:
        self._num_moves = self._num_rejected = 0
        self._retry_at = -inf

    def is_due(self, paused_at: float, now: float) -> bool:
        """Whether a request that has paused since then asks for another worker now."""
        pause_s = MIN_PAUSE_S * 2.0**self._num_moves
        is_long = now - paused_at >= pause_s and now >= self._retry_at
        return is_long and self._num_moves < MAX_MOVES

    def rejected(self, now: float) -> None:
        """Records an offer that came to nothing."""
        self._retry_at = now + min(RETRY_S * 2.0**self._num_rejected, MAX_RETRY_S)
        self._num_rejected = min(self._num_rejected + 1, 8)

    def moved(self) -> None:
        self._num_moves += 1
        self._num_rejected = 0
