"""How many tokens a step may have: for a time fewer than configured, after steps ran out of memory.
No I/O.

    a step runs out of memory ──▶ half of its tokens, FLOOR_TOKENS at least
    `patience` steps succeed  ──▶ twice as many, up to what is configured

Every failure doubles the patience, so that a device that has lost memory for good is not asked
for it with each prompt; where all tokens are allowed again, successes halve it.
"""

from __future__ import annotations

FLOOR_TOKENS = 16
LEAST_PATIENCE, MOST_PATIENCE = 16, 1024  # steps


class StepLimit:
    def __init__(self, max_tokens: int) -> None:
        self.tokens = self.max_tokens = max_tokens
        self._patience = LEAST_PATIENCE
        self._num_succeeded = 0  # since the last change

    @property
    def is_lowered(self) -> bool:
        return self.tokens < self.max_tokens

    @property
    def floor(self) -> int:
        return min(FLOOR_TOKENS, self.max_tokens)

    def lower(self, num_tokens: int) -> None:
        """A step of `num_tokens` ran out of memory."""
        self.tokens = max(self.floor, min(self.tokens, num_tokens) // 2)
        self._patience = min(MOST_PATIENCE, 2 * self._patience)
        self._num_succeeded = 0

    def succeeded(self) -> None:
        """A step was computed."""
        if self._patience == LEAST_PATIENCE and not self.is_lowered:
            return
        self._num_succeeded += 1
        if self._num_succeeded < self._patience:
            return
        self._num_succeeded = 0
        if self.is_lowered:
            self.tokens = min(self.max_tokens, 2 * self.tokens)
        else:
            self._patience = max(LEAST_PATIENCE, self._patience // 2)
