"""Begin and end of the phases of one placement, on the worker's clock. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import DecodePhases, PrefillPhases


@dataclass(slots=True, kw_only=True)
class PhaseTimes:
    """Times of one placement's phases. `accepted_at` and `complete_at` are those of the prefill at
    another worker that sent the KV. A time is None if the event has not happened.
    """

    started_at: float
    accepted_at: float | None = None
    complete_at: float | None = None
    first_step_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    num_steps: int = 0  # steps that returned tokens
    prefill: PrefillPhases | None = None

    def record_step(self, began_at: float) -> None:
        """Records a step that has computed a part of the prompt, or a token."""
        if self.first_step_at is None:
            self.first_step_at = began_at

    def record_tokens(self, now: float) -> None:
        """Records sampled tokens. The choices of one step have the same `now`."""
        if self.first_token_at is None:
            self.first_token_at = now
        if now != self.last_token_at:
            self.last_token_at = now
            self.num_steps += 1

    def phases(self, num_late_masks: int) -> DecodePhases:
        """Returns the three phases until the first token. They add up to its time
        after `started_at`.
        """
        first_token_at = self.last_token_at if self.first_token_at is None else self.first_token_at
        reserved_at, complete_at = self._bounds(first_token_at)
        return DecodePhases(
            reserve_s=reserved_at - self.started_at,
            prefill_wait_s=complete_at - reserved_at,
            first_step_s=first_token_at - complete_at,
            decode_s=self.last_token_at - first_token_at,
            num_steps=self.num_steps,
            num_late_masks=num_late_masks,
            prefill=self.prefill,
        )

    def _bounds(self, first_token_at: float) -> tuple[float, float]:
        """Returns when the blocks were held, and when the KV of the prompt was complete.

        A prompt that is computed here has its blocks with its first step, which may follow
        failed prefills.
        """
        if self.complete_at is None:
            began_at = first_token_at if self.first_step_at is None else self.first_step_at
            began_at = max(self.started_at, min(began_at, first_token_at))
            return began_at, began_at
        complete_at = min(self.complete_at, first_token_at)
        accepted_at = complete_at if self.accepted_at is None else self.accepted_at
        return min(accepted_at, complete_at), complete_at
