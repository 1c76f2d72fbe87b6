"""The time that a step may take before its worker is suspect, estimated from earlier steps."""

from __future__ import annotations

import numpy as np

from shared.engine.runner import StepInputs

FLOOR_S = 1.0
SLACK = 10.0
# Costs of a step, in units of one token's linear layers.
STEP_UNITS = 16
CONTEXT_TOKENS_PER_UNIT = 256


def step_units(inputs: StepInputs) -> float:
    pairs = int(np.dot(inputs.query_lens, inputs.context_lens))
    num_ranked = sum(len(each.token_ids) for each in inputs.prompt_logprobs.values())
    return STEP_UNITS + len(inputs.input_ids) + num_ranked + pairs / CONTEXT_TOKENS_PER_UNIT


class StepBudget:
    """Tracks the slowest recent pace: a slower step sets it, a faster one lowers it by 1 %."""

    def __init__(self, seconds_per_unit: float = 0.02) -> None:
        self._seconds_per_unit = seconds_per_unit

    def seconds(self, inputs: StepInputs) -> float:
        return FLOOR_S + SLACK * self._seconds_per_unit * step_units(inputs)

    def observe(self, inputs: StepInputs, elapsed_s: float) -> None:
        pace = elapsed_s / step_units(inputs)
        self._seconds_per_unit = max(pace, 0.99 * self._seconds_per_unit)
