"""A `GroupExecutor` whose only rank computes in this process, with the formula of another executor.

Commands are encoded, and answered in order, as those of a group of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import msgspec

from shared.clock import Clock
from shared.engine.executors.group.group_executor import GroupExecutor
from shared.engine.executors.group.messages import Command, GroupModel
from shared.engine.executors.group.rank_profile import RankProfile
from shared.engine.executors.group.rank_work import ModelWork
from shared.engine.executors.rank_state import RankState
from shared.engine.executors.timing_executor import TimingExecutor
from shared.engine.step import StepInputs, StepOutput, TokenMask
from tests.support.engine.rig import InstantClock, finish


class _Computer:
    """What raises fails its step after the last exchange, when sums are known already."""

    def __init__(self, executor: TimingExecutor) -> None:
        self._executor = executor
        self.failure = ""

    def run(self, inputs: StepInputs) -> StepOutput:
        self.failure = ""
        output = finish(TimingExecutor.run(self._executor, inputs))
        try:
            return finish(self._executor.run(inputs))
        except RuntimeError as error:
            self.failure = str(error)
            return StepOutput([], pooled=output.pooled)

    def run_idle(self, query_lens: list[int], *, temperature: float) -> None:
        pass

    def expert_counts(self) -> None:
        pass


class _Rank(ModelWork):
    def __init__(self, executor: TimingExecutor) -> None:
        layout = executor.kv_layout
        self._computer = _Computer(executor)
        self._state = RankState(layout.block_size, len(layout.groups))
        self._masks = self
        self._profile = RankProfile(InstantClock())
        self.masks: Sequence[TokenMask] = ()

    def of_step(self, step: int, count: int) -> Sequence[TokenMask]:
        return self.masks


class _Steps:
    """`GroupSteps`."""

    def __init__(self, rank: _Rank, clock: Clock, step_s: float) -> None:
        self.group = SimpleNamespace(loss=None, on_extended=lambda handler: None)
        self.rank_state = rank._state
        self._rank, self._clock, self._step_s = rank, clock, step_s
        self._sent: dict[int, tuple[bytes, Sequence[TokenMask]]] = {}
        self._number = 0

    def submit(
        self, command: Command, budget_s: float = 0.0, masks: Sequence[TokenMask] = ()
    ) -> int:
        self._sent[self._number] = msgspec.msgpack.encode(command), masks
        self._number += 1
        return self._number - 1

    async def answer(self, number: int) -> bytes:
        await self._clock.sleep(self._step_s)
        data, self._rank.masks = self._sent.pop(number)
        return self._rank.run(number, data)

    async def command(self, command: Command, budget_s: float = 0.0) -> bytes:
        return await self.answer(self.submit(command))

    async def close(self) -> None:
        pass


def group_in_process(executor: TimingExecutor, clock: Clock, step_s: float) -> GroupExecutor:
    """With as many stages as `executor` has. A step takes `step_s`."""
    executor._clock = InstantClock()
    model = GroupModel(
        kv_layout=executor.kv_layout,
        numerics=executor.numerics,
        num_blocks=executor.num_blocks,
        max_blocks=executor.max_blocks,
        max_context_tokens=executor.max_context_tokens,
        vocab_size=executor.vocab_size,
        eos_token_ids=executor.eos_token_ids,
        has_head=executor.has_head,
        revision=executor.revision,
        depth=executor.num_stages,
        work=executor.work,
    )
    steps, links = _Steps(_Rank(executor), clock, step_s), Mock(close=AsyncMock())
    return GroupExecutor(steps, links, model, num_stages=executor.num_stages, clock=clock)
