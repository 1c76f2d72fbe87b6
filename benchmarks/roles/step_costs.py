"""Step times of a stated device, as formulas, and as one word of a command line."""

from __future__ import annotations

from dataclasses import dataclass

from shared.engine.executors.timing_executor import StepCost
from shared.engine.step import StepInputs


@dataclass(frozen=True, slots=True)
class OverlapCost(StepCost):
    """Reading weights and computing tokens overlap."""

    def of(self, inputs: StepInputs) -> float:
        num_tokens, num_context = len(inputs.input_ids), int(inputs.context_lens.sum())
        step_s = max(self.base_s, num_tokens * self.per_token_s)
        return step_s + num_context * self.per_context_token_s


def word_of(cost: StepCost) -> str:
    """Returns the inverse of `cost_of`: a step cost as one word."""
    kind = "overlap" if isinstance(cost, OverlapCost) else "sum"
    return f"{kind}:{cost.base_s!r}:{cost.per_token_s!r}:{cost.per_context_token_s!r}"


def cost_of(word: str) -> StepCost:
    """Returns the step cost of `kind:step:token:context token` in seconds, or of a step's seconds
    alone.
    """
    if ":" not in word:
        return StepCost(base_s=float(word), per_token_s=0.0, per_context_token_s=0.0)
    kind, *seconds = word.split(":")
    return {"overlap": OverlapCost, "sum": StepCost}[kind](*map(float, seconds))
