"""One step at a time in this process, on the runner's own thread."""

from __future__ import annotations

from collections.abc import Sequence

from shared.engine.executors.rank_state import RankState
from shared.engine.runner import KvPort, Runner, StepInputs, StepOutput, TokenMask
from shared.engine.step_plan import StepPlan


class InProcessExecutor:
    """An `Executor` of depth 1. Its step starts when the result is awaited."""

    depth = 1
    num_stages = 1

    def __init__(self, runner: Runner) -> None:
        self.kv: KvPort = runner
        self.step_budget_s = 0.0
        self._runner = runner
        self._state = RankState(runner.kv_layout.block_size)
        self._inputs: StepInputs | None = None

    @property
    def is_lost(self) -> bool:
        return self._runner.is_lost

    @property
    def step_extension_s(self) -> float:
        return self._runner.step_extension_s

    def submit(self, plan: StepPlan, masks: Sequence[TokenMask] = ()) -> None:
        self._inputs = self._state.apply(plan, masks)
        self.step_budget_s = self._runner.step_budget_s(self._inputs)

    async def result(self, step: int) -> StepOutput:
        inputs, self._inputs = self._inputs, None
        if inputs is None:
            raise ValueError(f"step {step} was not submitted")
        output = await self._runner.run(inputs)
        self._state.record(output)
        return output

    async def check(self) -> None:
        await self._runner.check()

    async def close(self) -> None:
        await self._runner.close()
