"""The gateway's record of one placement of a request, on its own clock. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import Placed, Served


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
    outcome: str = ""
    ended_at: float = 0.0

    def record_placed(self, placed: Placed, now: float) -> None:
        self.placed, self.placed_at = placed, now

    def record_tokens(self, num_tokens: int, served: Served | None, now: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.num_tokens += num_tokens
        if served is not None:
            self.served = served

    def end(self, outcome: str, now: float) -> None:
        """Records the outcome and the time. Does nothing for an ended try."""
        if not self.outcome:
            self.outcome, self.ended_at = outcome, now
