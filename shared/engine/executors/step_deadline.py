"""The time that a step may take before its worker is suspect, estimated from earlier steps."""

from __future__ import annotations

import numpy as np

from shared.engine.step import StepInputs

FLOOR_S = 1.0
SLACK = 10.0
COMPILE_S = 30.0  # limit for one kernel: 1 to 5 s on an idle host
# Costs of a step, in units of one token's linear layers.
STEP_UNITS = 16
CONTEXT_TOKENS_PER_UNIT = 256


def step_units(inputs: StepInputs) -> float:
    pairs = int(np.dot(inputs.query_lens, inputs.context_lens))
    num_ranked = sum(len(each.token_ids) for each in inputs.prompt_logprobs.values())
    return units_of(len(inputs.input_ids), num_ranked, pairs)


def units_of(num_tokens: int, num_ranked: int, num_pairs: int) -> float:
    """Returns the units of a step's tokens, tokens with ranked logprobs, and pairs of query and
    key.
    """
    return STEP_UNITS + num_tokens + num_ranked + num_pairs / CONTEXT_TOKENS_PER_UNIT


class StepBudget:
    """Computes the budgets of steps measured in `step_units`. Tracks the slowest recent pace: a
    slower step sets it, a faster one lowers it by 1 %.

    A kernel that is compiled during a step extends this step's budget, and the step says nothing
    about the pace.
    """

    def __init__(self) -> None:
        self._seconds_per_unit = 0.02
        self._num_compiled = 0  # kernels compiled in the steps in flight

    def seconds(self, units: float, *, is_first: bool = True) -> float:
        """Returns the seconds that the next step may take. Must be called before each step;
        `is_first` says that none is in flight.
        """
        if is_first:
            self._num_compiled = 0
        return FLOOR_S + SLACK * self._seconds_per_unit * units

    @property
    def extension_s(self) -> float:
        """Time for the compiler, to be added to the budget of the steps in flight."""
        return COMPILE_S * self._num_compiled

    def compiling(self) -> None:
        """Records that a kernel is about to be compiled, on any thread."""
        self._num_compiled += 1

    def observe(self, units: float, elapsed_s: float) -> None:
        if self._num_compiled:
            self._num_compiled = 0
            return
        pace = elapsed_s / units
        self._seconds_per_unit = max(pace, 0.99 * self._seconds_per_unit)
