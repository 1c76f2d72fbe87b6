"""A worker with the timing engine whose steps can be made to fail.

Run: python -m benchmarks.adversity.worker ROLE STEP_S FAILS_AFTER_S POISON_SEED OPTIONS…

A token depends on all KV before it, so responses that are equal had equal KV. The options are those
of `hearth ROLE`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from shared.config import WorkerConfig
from shared.engine.executors.timing_executor import StepCost
from shared.engine.step import StepInputs, StepOutput
from tests.support.cluster.timing import DemoTimingExecutor, run_worker

POISON_OUTPUT_POSITION = 20  # by then, requests that arrived together share their steps


@dataclass(frozen=True, slots=True)
class StepFaults:
    """Faults of a worker's steps.

    Every step raises from `after_s` seconds after the first one on, and the steps of a request with
    the sampling seed `poison_seed` raise. -1 switches either off.
    """

    after_s: float = -1.0
    poison_seed: int = -1

    def check(self, inputs: StepInputs, since_first_s: float) -> None:
        """Raises RuntimeError if this step fails."""
        if 0 <= self.after_s <= since_first_s:
            raise RuntimeError("the device fails every step")
        rows = inputs.sampling.rows
        is_late = rows["output_position"] >= POISON_OUTPUT_POSITION
        if self.poison_seed >= 0 and (is_late & (rows["seed"] == self.poison_seed)).any():
            raise RuntimeError("a row breaks the step")


class FaultyExecutor(DemoTimingExecutor):
    """A timing engine with failing steps. Its device check passes: only the steps show the
    failure.
    """

    def __init__(self, config: WorkerConfig, step_s: float, faults: StepFaults) -> None:
        super().__init__(config, StepCost(base_s=step_s))
        self._faults = faults
        self._first_step_at: float | None = None

    async def run(self, inputs: StepInputs) -> StepOutput:
        now = self._clock.now()
        if self._first_step_at is None:
            self._first_step_at = now
        self._faults.check(inputs, now - self._first_step_at)
        return await super().run(inputs)


def main() -> None:
    role, step_s, after_s, poison_seed = (sys.argv.pop(1) for _ in range(4))
    faults = StepFaults(after_s=float(after_s), poison_seed=int(poison_seed))
    run_worker(role, lambda config: FaultyExecutor(config, float(step_s), faults))


if __name__ == "__main__":
    main()
