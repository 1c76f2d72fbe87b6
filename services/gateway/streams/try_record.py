"""The gateway's record of one placement of a request, on its own clock. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.messages import Placed, Served
from shared.telemetry.timeline import Move


@dataclass(slots=True)
class TryRecord:
    """One try, from its submission to its end. `outcome` is empty while it runs. A field is None if
    its event has not occurred.
    """

    number: int
    submitted_at: float
    placed: Placed | None = None
    placed_at: float = 0.0
    first_token_at: float | None = None
    last_token_at: float = 0.0
    num_tokens: int = 0
    served: Served | None = None
    is_counted: bool = False  # whether `served` has the final counts of a choice
    move: Move | None = None  # how it continued the request
    outcome: str = ""
    ended_at: float = 0.0

    def record_placed(self, placed: Placed, now: float) -> None:
        self.placed, self.placed_at = placed, now

    def record_tokens(
        self, num_tokens: int, served: Served | None, now: float, *, is_counted: bool
    ) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.num_tokens += num_tokens
        if served is not None:
            self.served, self.is_counted = served, is_counted

    def end(self, outcome: str, now: float) -> None:
        """Records the outcome and the time. Does nothing for an ended try."""
        if not self.outcome:
            self.outcome, self.ended_at = outcome, now


def move_of(tries: Sequence[TryRecord], now: float) -> Move | None:
    """Returns the move that a token of the last try ends, or None if it is not the first token
    there, or no other worker had the request before.
    """
    *before, last = tries
    if last.placed is None or last.first_token_at is not None:
        return None
    began = max((i for i, each in enumerate(before) if each.first_token_at is not None), default=-1)
    left = before[max(0, began) :]
    workers = tuple(each.placed.worker_id for each in left if each.placed is not None)
    if not workers:
        return None
    paused_at = before[began].last_token_at if began >= 0 else before[0].submitted_at
    return Move(
        from_workers=workers,
        cause=left[0].outcome,
        worker=last.placed.worker_id,
        pause_s=now - paused_at,
    )
