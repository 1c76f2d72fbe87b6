"""A worker's group of ranks, as its leader sees it: answers, silence, or its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from shared.clock import Clock
from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.executors.timing_executor import TimingExecutor
from shared.engine.step import StepOutput, TokenMask
from shared.errors import DeviceFailed
from tests.support.world.process import SimulatedProcess

STOPPED_S = 1.25  # until the leader ends a group of which a rank is stopped


class SimulatedGroup(TimingExecutor):
    """A timing engine that stands for several ranks. A failure of one rank ends the group.

    `group` is the leader's process; None means that there is one rank only.
    """

    def __init__(
        self, clock: Clock, *, group: SimulatedProcess | None = None, **options: Any
    ) -> None:
        super().__init__(clock, **options)
        self.group = group
        self._runs_ahead = group is not None
        self._lost = asyncio.Event()
        self._is_frozen = False

    @property
    def has_ended(self) -> bool:  # type: ignore[override]
        return self._lost.is_set()

    def kill_rank(self) -> None:
        self._lost.set()

    def freeze_rank(self) -> None:
        """Steps no longer end, until the watchdog ends the group."""
        assert self.group is not None
        self._is_frozen = True
        self.group.call_later(min(STOPPED_S, self.step_budget_s or STOPPED_S), self._lost.set)

    def submit(self, rows: list[ScheduledSequence]) -> int:
        self._check_group()
        return super().submit(rows)

    async def result(self, step: int) -> StepOutput:
        if self.group is None:
            return await super().result(step)
        answer, lost = self._steps[step].answer, asyncio.create_task(self._lost.wait())
        try:
            await asyncio.wait((answer, lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
        if self.has_ended:
            del self._steps[step]
            answer.cancel()
            await asyncio.wait((answer,))
            _ = answer.cancelled() or answer.exception()  # the answer of a lost group is void
        self._check_group()
        return await super().result(step)

    async def check(self) -> None:
        self._check_group()
        await super().check()
        self._check_group()

    async def _answer(
        self, payload: bytes, masks: Sequence[TokenMask], previous: asyncio.Task[bytes] | None
    ) -> bytes:
        answer = await super()._answer(payload, masks, previous)
        if self._is_frozen:
            await self._lost.wait()
        return answer

    def _check_group(self) -> None:
        if self.has_ended:
            raise DeviceFailed("a rank of this worker is lost")
