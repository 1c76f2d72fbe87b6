"""Counts a worker's steps: their number, sizes and time, what they moved and computed."""

from __future__ import annotations

from bisect import bisect_left

from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.planning.step_work import ModelWorkload
from shared.engine.step import StepOutput
from shared.messages import STEP_TOKENS


class StepCounters:
    """All are sums since the process started. `by_tokens` counts steps by `STEP_TOKENS`."""

    def __init__(self, work: ModelWorkload) -> None:
        self.num_steps = 0
        self.busy_s = 0.0
        self.traffic_bytes = 0.0
        self.num_operations = 0.0
        self.by_tokens = [0] * (len(STEP_TOKENS) + 1)
        self._work = work
        self._answered_at = 0.0  # the last step

    def add(
        self, rows: list[ScheduledSequence], output: StepOutput, *, began_at: float, now: float
    ) -> None:
        """Counts a step that succeeded. Of its time counts what follows the end of the one before,
        beside which it was computed.
        """
        self.num_steps += 1
        self.busy_s += now - max(began_at, self._answered_at)
        self._answered_at = now
        counts = [row.num_scheduled_tokens for row in rows]
        num_logits = len(output.token_ids)
        if output.prompt_logprobs:
            num_logits += sum(map(len, output.prompt_logprobs.values()))
        work = self._work.of([row.start for row in rows], counts, num_logits)
        self.traffic_bytes += work.num_bytes
        self.num_operations += work.num_operations

    def add_tokens(self, num_tokens: int) -> None:
        """Counts the tokens by which the step advanced its sequences."""
        self.by_tokens[bisect_left(STEP_TOKENS, num_tokens)] += 1
