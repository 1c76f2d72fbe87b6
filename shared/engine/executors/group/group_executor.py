"""An `Executor` whose steps are computed by a group of rank processes; the leader has no weights.

One worker of the fleet is one group: the leader has the bus, the batcher and the block pool, the
ranks have weights and KV. All ranks get the same plans, and the last stage's first rank samples.
A pipeline of S stages has S steps in flight. The only rank of a worker may have two: the second one
takes the tokens of the first where they are.

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
from shared.engine.executors.executor import PROFILE_S, RecordedSteps, StepLaunch
from shared.engine.executors.group.group_steps import (
    COMMAND_TIMEOUT_S,
    RESIZE_TIMEOUT_S,
    GroupSteps,
)
from shared.engine.executors.group.kv.rank_links import RankLinks
from shared.engine.executors.group.messages import (
    CheckDevice,
    Command,
    CommandAnswer,
    CommandFailed,
    CountExperts,
    EndRows,
    ExpertCounts,
    GiveBackBlocks,
    GroupModel,
    KvPrepared,
    PrepareKv,
    RunStep,
    ZeroBlocks,
)
from shared.engine.executors.plan_builder import PlanBuilder
from shared.engine.executors.step_deadline import StepBudget, units_of
from shared.engine.parallel.links import RankLink
from shared.engine.step import StepOutput
from shared.engine.step_plan import decode_result, encode
from shared.errors import ERROR_BY_CODE, HearthError, OutOfMemory, StepFailed
from shared.messages import ProfilePart, ProfileSteps, ReadProfile

PROFILE_POLL_S = 0.2  # between questions whether a recording is complete

_decoder: msgspec.msgpack.Decoder[CommandAnswer] = msgspec.msgpack.Decoder(CommandAnswer)


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    units: float
    budget_s: float
    began_at: float


class GroupExecutor:
    """Runs steps on the ranks of a pipeline of `num_stages`. `kv_links` lead to the data planes of
    all ranks.
    """

    num_out_of_memory = 0  # ranks do not tell

    def __init__(
        self,
        steps: GroupSteps,
        kv_links: RankLinks,
        model: GroupModel,
        *,
        num_stages: int,
        clock: Clock,
    ) -> None:
        self.kv_layout = model.kv_layout
        self.numerics = model.numerics
        self.kv_links = kv_links
        self.num_stages = num_stages
        self.depth = model.depth
        self.is_elastic = model.is_elastic
        self.num_blocks = model.num_blocks
        self.max_blocks = model.max_blocks
        self.max_context_tokens = model.max_context_tokens
        self.vocab_size = model.vocab_size
        self.eos_token_ids = model.eos_token_ids
        self.has_head = model.has_head
        self.revision = model.revision
        self.gpu_uuid = model.gpu_uuid
        self.offloaded_bytes = model.offloaded_bytes
        self.work, self.peaks = model.work, model.peaks
        self.step_launch: StepLaunch = model.step_launch
        self._steps = steps
        # Only the answering rank has the tokens that it samples. It computes ahead with them if it
        # is the only one.
        self._plans = PlanBuilder(feeds_sampled=self.depth <= num_stages)
        self._clock = clock
        self._budget = StepBudget()
        self._in_flight: dict[int, _StepInFlight] = {}
        self._answered_at = 0.0
        self._extension_s = 0.0  # more time for steps while they are recorded
        steps.group.on_extended(self._budget.compiling)

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
        budgets = [step.budget_s for step in self._in_flight.values()]
        return max(budgets, default=0.0) if self.num_stages > 1 else sum(budgets)

    @property
    def step_extension_s(self) -> float:
        return self._budget.extension_s + self._extension_s

    def submit(self, rows: list[ScheduledSequence]) -> int:
        """Raises DeviceFailed if the group is lost."""
        if len(self._in_flight) >= self.depth:
            raise ValueError(f"{self.depth} steps are in flight, no more may be")
        units = _units(rows)
        budget_s = self._budget.seconds(units, is_first=not self._in_flight) + self._extension_s
        plan, masks = self._plans.build(rows)
        try:
            step = self._steps.submit(RunStep(encode(plan)), budget_s, masks)
        except BaseException:  # the ranks have not got it
            self._plans.take_back(plan, rows)
            raise
        self._in_flight[step] = _StepInFlight(units, budget_s, self._clock.now())
        return step

    async def result(self, step: int) -> StepOutput:
        """Raises DeviceFailed if the group is lost, StepFailed if the step raised, OutOfMemory if
        its device has too little.
        """
        under_way = self._in_flight[step]
        try:
            answer = decode_result(await self._steps.answer(step))
        finally:
            del self._in_flight[step]
        now = self._clock.now()
        if not self._extension_s:  # steps that are recorded say nothing of the pace
            elapsed_s = now - max(under_way.began_at, self._answered_at)
            self._budget.observe(under_way.units, elapsed_s)
        self._answered_at = now
        if answer.is_out_of_memory:
            raise OutOfMemory(answer.failure)
        if answer.failure:
            raise StepFailed(answer.failure)
        return answer.output

    async def check(self) -> None:
        await self._command(CheckDevice())

    async def forget_ended(self) -> None:
        if ended := self._plans.end_rows():
            await self._command(EndRows(ended))

    async def zero_blocks(self, block_ids: list[int]) -> None:
        await self._command(ZeroBlocks(block_ids))

    async def give_back(self, block_ids: list[int]) -> None:
        await self._command(GiveBackBlocks(block_ids))

    async def resize_kv(self, num_blocks: int) -> None:
        prepared = await self._command(PrepareKv(num_blocks), RESIZE_TIMEOUT_S)
        if isinstance(prepared, KvPrepared):
            self.offloaded_bytes = prepared.offloaded_bytes

    async def expert_counts(self) -> NDArray[np.int64] | None:
        counted = await self._command(CountExperts())
        if not isinstance(counted, ExpertCounts):
            return None
        return np.frombuffer(counted.counts, np.int64).reshape(-1, counted.num_experts)

    async def _command(
        self, command: Command, budget_s: float = COMMAND_TIMEOUT_S
    ) -> ExpertCounts | KvPrepared | ProfilePart | None:
        """Raises DeviceFailed if the group is lost, and the HearthError of a rank."""
        answer = await self._steps.command(command, budget_s)
        if not answer:
            return None
        match _decoder.decode(answer):
            case CommandFailed(code=code, message=message):
                raise ERROR_BY_CODE.get(code, HearthError)(message)
            case found:
                return found

    async def profile(self, num_steps: int, timeout_s: float) -> RecordedSteps:
        self._extension_s = PROFILE_S
        try:
            await self._command(ProfileSteps(num_steps=num_steps, timeout_s=timeout_s), PROFILE_S)
            while (part := await self._trace_part(0)).num_bytes is None:
                await self._clock.sleep(PROFILE_POLL_S)
        finally:
            self._extension_s = 0.0
        trace = bytearray(part.data)
        while len(trace) < part.num_bytes:
            trace += (await self._trace_part(len(trace))).data
        return RecordedSteps(part.num_steps, bytes(trace))

    async def _trace_part(self, first_byte: int) -> ProfilePart:
        part = await self._command(ReadProfile(number=0, first_byte=first_byte), PROFILE_S)
        assert isinstance(part, ProfilePart)
        return part

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
