"""One step at a time in this process, on the runner's own thread."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.inputs import build_inputs
from shared.engine.runner import Runner, StepInputs, StepOutput


class InProcessExecutor:
    """An `Executor` of depth 1. Its step starts when the result is awaited.

    Inputs are built from the sequences themselves: plans, which say what has changed, pay where a
    step is sent to another process.
    """

    depth = 1
    num_stages = 1

    def __init__(self, runner: Runner) -> None:
        self.kv_layout = runner.kv_layout
        self.max_blocks = runner.max_blocks
        self.is_elastic = runner.is_elastic
        self.step_budget_s = 0.0
        self._runner = runner
        self._step = -1
        self._inputs: StepInputs | None = None

    @property
    def has_ended(self) -> bool:
        return self._runner.has_ended

    @property
    def step_extension_s(self) -> float:
        return self._runner.step_extension_s

    def submit(self, rows: list[ScheduledSequence]) -> int:
        self._inputs = build_inputs(rows, self._runner.kv_layout.block_size)
        self.step_budget_s = self._runner.step_budget_s(self._inputs)
        self._step += 1
        return self._step

    async def result(self, step: int) -> StepOutput:
        inputs, self._inputs = self._inputs, None
        if inputs is None or step != self._step:
            raise ValueError(f"step {step} is not in flight")
        return await self._runner.run(inputs)

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
        await self._runner.close()
