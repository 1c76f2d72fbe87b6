"""An `Executor` whose steps are computed by a group of rank processes; the leader has no weights.

One worker of the fleet is one group: the leader has the bus, the batcher and the block pool, the
ranks have weights and KV. All ranks get the same plans, and the last stage's first rank samples.
A pipeline of S stages has S steps in flight.

A rank that dies, freezes or fails ends the group: its steps raise, `has_ended` says so, and the
worker leaves the fleet.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.clock import Clock
from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.executors.executor import StepLaunch
from shared.engine.executors.group.group_steps import GroupSteps
from shared.engine.executors.group.kv.rank_links import RankLinks
from shared.engine.executors.group.messages import (
    CheckDevice,
    CountExperts,
    EndRows,
    ExpertCounts,
    GiveBackBlocks,
    ReturnFreedMemory,
    RunStep,
    ZeroBlocks,
)
from shared.engine.executors.plan_builder import PlanBuilder
from shared.engine.executors.step_deadline import StepBudget, units_of
from shared.engine.parallel.links import RankLink
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.step import StepOutput
from shared.engine.step_plan import decode_result, encode
from shared.errors import StepFailed
from shared.kv_layout import KvLayout
from shared.numerics import Numerics


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    units: float
    budget_s: float
    began_at: float


class GroupExecutor:
    """Runs steps on several ranks. `revision`, `kv_layout` and `numerics` are those of the whole
    model. `kv_links` lead to the data planes of all ranks.
    """

    is_elastic = True
    step_launch: StepLaunch = ""  # ranks compute on CPUs
    step_extension_s = 0.0
    gpu_uuid = ""

    def __init__(
        self,
        steps: GroupSteps,
        kv_links: RankLinks,
        shape: MeshShape,
        *,
        kv_layout: KvLayout,
        numerics: Numerics,
        num_blocks: int,
        max_blocks: int,
        max_context_tokens: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        has_head: bool,
        revision: str,
        clock: Clock,
    ) -> None:
        self.kv_layout = kv_layout
        self.numerics = numerics
        self.kv_links = kv_links
        self.depth = self.num_stages = shape.pp
        self.num_blocks = num_blocks
        self.max_blocks = max_blocks
        self.max_context_tokens = max_context_tokens
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.has_head = has_head
        self.revision = revision
        self._steps = steps
        # only the answering rank has the tokens that it samples
        self._plans = PlanBuilder(feeds_sampled=True)
        self._clock = clock
        self._budget = StepBudget()
        self._in_flight: dict[int, _StepInFlight] = {}
        self._answered_at = 0.0

    @property
    def has_ended(self) -> bool:
        return self._steps.group.loss is not None

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return self._steps.group.pids

    @property
    def links(self) -> tuple[RankLink, ...]:
        """Links that the ranks measured as they joined."""
        return self._steps.group.links

    @property
    def step_budget_s(self) -> float:
        return max((step.budget_s for step in self._in_flight.values()), default=0.0)

    def submit(self, rows: list[ScheduledSequence]) -> int:
        """Raises DeviceFailed if the group is lost."""
        if len(self._in_flight) >= self.depth:
            raise ValueError(f"{self.depth} steps are in flight, no more may be")
        units = _units(rows)
        budget_s = self._budget.seconds(units)
        plan, masks = self._plans.build(rows)
        try:
            step = self._steps.submit(RunStep(encode(plan)), budget_s, masks)
        except BaseException:  # the ranks have not got it
            self._plans.take_back(plan, rows)
            raise
        self._in_flight[step] = _StepInFlight(units, budget_s, self._clock.now())
        return step

    async def result(self, step: int) -> StepOutput:
        """Raises DeviceFailed if the group is lost, StepFailed if sampling raised."""
        under_way = self._in_flight[step]
        try:
            answer = decode_result(await self._steps.answer(step))
        finally:
            del self._in_flight[step]
        now = self._clock.now()
        self._budget.observe(under_way.units, now - max(under_way.began_at, self._answered_at))
        self._answered_at = now
        if answer.failure:
            raise StepFailed(answer.failure)
        return answer.output

    async def check(self) -> None:
        await self._steps.command(CheckDevice())

    async def forget_ended(self) -> None:
        if ended := self._plans.end_rows():
            await self._steps.command(EndRows(ended))

    async def zero_blocks(self, block_ids: list[int]) -> None:
        await self._steps.command(ZeroBlocks(block_ids))

    async def give_back(self, block_ids: list[int]) -> None:
        await self._steps.command(GiveBackBlocks(block_ids))

    async def resize_kv(self, num_blocks: int) -> None:
        if num_blocks == 0:
            await self._steps.command(ReturnFreedMemory())

    async def expert_counts(self) -> NDArray[np.int64] | None:
        answer = await self._steps.command(CountExperts())
        if not answer:
            return None
        counted = msgspec.msgpack.decode(answer, type=ExpertCounts)
        return np.frombuffer(counted.counts, np.int64).reshape(-1, counted.num_experts)

    async def close(self) -> None:
        """Waits for nothing: ranks end at once."""
        await self.kv_links.close()
        await self._steps.close()


def _units(rows: list[ScheduledSequence]) -> float:
    """Returns the units of a step: see `step_units`, which counts the same in the inputs of a
    step.
    """
    counts = [row.num_scheduled_tokens for row in rows]
    num_pairs = sum(count * (row.start + count) for row, count in zip(rows, counts, strict=True))
    ranked = [row.num_scheduled_tokens for row in rows if row.sequence.prompt_logprobs is not None]
    return units_of(sum(counts), sum(ranked), num_pairs)
