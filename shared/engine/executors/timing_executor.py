"""Several steps in flight over a timing runner, driven by encoded plans as ranks are.

For the simulation and for tests of what runs ahead: a device that computes queued steps in order,
or a pipeline, whose stages together hold as many steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.background import start_awaited
from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.executors.plan_builder import PlanBuilder
from shared.engine.executors.rank_state import RankState
from shared.engine.runner import StepOutput, TokenMask
from shared.engine.runners.timing_runner import TimingRunner
from shared.engine.step_plan import StepResult, decode_plan, decode_result, encode


class TimingExecutor:
    """An `Executor`."""

    has_ended = False

    def __init__(self, runner: TimingRunner, *, depth: int = 2, num_stages: int = 1) -> None:
        self.kv_layout = runner.kv_layout
        self.max_blocks = runner.max_blocks
        self.is_elastic = runner.is_elastic
        self.depth = depth
        self.num_stages = num_stages
        self.step_budget_s = 0.0
        self._runner = runner
        self._plans = PlanBuilder(feeds_drawn=num_stages > 1)
        self._state = RankState(runner.kv_layout.block_size, len(runner.kv_layout.groups))
        self._steps: dict[int, asyncio.Task[bytes]] = {}
        self._last: asyncio.Task[bytes] | None = None

    @property
    def step_extension_s(self) -> float:
        return self._runner.step_extension_s

    def submit(self, rows: list[ScheduledSequence]) -> int:
        if len(self._steps) >= self.depth:
            raise ValueError(f"{len(self._steps)} steps are in flight, at most {self.depth} may be")
        plan, masks = self._plans.build(rows)
        step = start_awaited(self._compute(encode(plan), masks, self._last))
        self._steps[plan.step] = self._last = step
        return plan.step

    async def result(self, step: int) -> StepOutput:
        task = self._steps[step]
        await asyncio.wait((task,))
        del self._steps[step]
        return decode_result(task.result()).output

    async def check(self) -> None:
        await self._runner.check()

    async def zero_blocks(self, block_ids: list[int]) -> None:
        await self._runner.zero_blocks(block_ids)

    async def give_back(self, block_ids: list[int]) -> None:
        await self._runner.give_back(block_ids)

    async def resize_kv(self, num_blocks: int) -> None:
        await self._runner.resize_kv(num_blocks)

    async def expert_counts(self) -> NDArray[np.int64] | None:
        return await self._runner.expert_counts()

    async def close(self) -> None:
        if self._last is not None:
            await asyncio.wait((self._last,))
        await self._runner.close()

    async def _compute(
        self, payload: bytes, masks: Sequence[TokenMask], previous: asyncio.Task[bytes] | None
    ) -> bytes:
        if previous is not None:
            await asyncio.wait((previous,))
        plan = decode_plan(payload)
        inputs = self._state.apply(plan, masks)
        self.step_budget_s = self._runner.step_budget_s(inputs)
        output = await self._runner.run(inputs)
        self._state.record(output)
        return encode(StepResult(plan.step, output))
