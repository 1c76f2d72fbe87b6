"""The steps of one rank that are submitted and not yet answered, at most two.

    submit 1   submit 2           result 1 ──▶ submit 3      result 2
       │          │                  │            │              │
       ▼          ▼                  ▼            ▼              ▼
    launched   launched, reads     tokens of   launched      tokens of
               tokens of step 1    step 1                    step 2
               where they are

A step is launched when it is submitted. Tokens that the step before it samples are not known then:
its inputs name their places in that step's output. A step whose inputs depend on more of that
output, such as sums or penalties, is launched once it is there, and so is one whose launch waits
for its own results, such as logprobs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.executors.plan_builder import PlanBuilder
from shared.engine.executors.rank_state import RankState, Recording
from shared.engine.step import StepInputs, StepOutput, TokenMask
from shared.engine.step_plan import StepPlan

MOST_AHEAD = 2  # a place in an output is one of the step before

Answer = Callable[[], Awaitable[StepOutput]]


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    masks: Sequence[TokenMask]
    take_back: Callable[[], None]
    recording: Recording | None = None
    answer: Answer | None = None  # None: not launched
    error: BaseException | None = None  # it is not launched, and its result raises this


class PlanQueue:
    """Applies plans and launches their steps, wherever the plans are made."""

    def __init__(
        self, block_size: int, num_groups: int, start: Callable[[StepInputs], Answer]
    ) -> None:
        """`start` launches a step after those before it, and returns how to await its output."""
        self.state = RankState(block_size, num_groups)
        self._start = start
        self._steps: deque[_Step] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def submit(
        self, plan: StepPlan, masks: Sequence[TokenMask], take_back: Callable[[], None]
    ) -> None:
        """Launches the step of a plan, or queues it. Calls `take_back` if the plan cannot be
        applied: then this raises, or `result` does. Raises ValueError if two are in flight.
        """
        step = _Step(plan, masks, take_back)
        try:
            if len(self._steps) >= MOST_AHEAD:
                raise ValueError(f"{MOST_AHEAD} steps are in flight, no more may be")
            if not (self._steps and self.state.needs_output(plan)):
                self._launch(step)
        except BaseException:
            take_back()
            raise
        self._steps.append(step)

    async def result(self, number: int) -> StepOutput:
        """Returns the output of the oldest step, and raises what it raises."""
        if not self._steps or self._steps[0].plan.step != number:
            raise ValueError(f"step {number} is not in flight, or not the oldest")
        step = self._steps[0]
        try:
            if step.error is not None:
                raise step.error
            assert step.answer is not None, "the oldest step is launched"
            output = await step.answer()
            self.state.record(output, step.recording)
            return output
        finally:
            self._steps.popleft()
            self._launch_next()

    def _launch(self, step: _Step) -> None:
        """Raises if its plan cannot be applied."""
        unread = self._steps[0].recording if self._steps else None
        inputs = self.state.apply(step.plan, step.masks, unread)
        step.recording = self.state.recording
        try:
            step.answer = self._start(inputs)
        except BaseException as error:  # the plan has been applied
            step.error = error

    def _launch_next(self) -> None:
        """Launches the step that waited for the output of the one that has left."""
        if not self._steps or self._steps[0].answer or self._steps[0].error:
            return
        (step,) = self._steps
        self._steps.clear()
        try:
            self._launch(step)
        except BaseException as error:  # raised where its result is awaited
            step.take_back()
            step.error = error
        self._steps.append(step)


class StepQueue:
    """Makes the plans of steps, and computes them in this process."""

    def __init__(
        self, block_size: int, num_groups: int, start: Callable[[StepInputs], Answer]
    ) -> None:
        """`start`: see PlanQueue."""
        self._plans = PlanBuilder()
        self._queue = PlanQueue(block_size, num_groups, start)

    @property
    def state(self) -> RankState:
        return self._queue.state

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, rows: list[ScheduledSequence], depth: int = 1) -> int:
        """Returns the number of the step. Raises ValueError if `depth` steps are in flight."""
        if len(self._queue) >= min(depth, MOST_AHEAD):
            raise ValueError(f"{len(self._queue)} steps are in flight, no more may be")
        plan, masks = self._plans.build(rows)
        self._queue.submit(plan, masks, partial(self._plans.take_back, plan, rows))
        return plan.step

    async def result(self, number: int) -> StepOutput:
        """Returns the output of the oldest step, and raises what it raises."""
        return await self._queue.result(number)

    def end_rows(self) -> None:
        """Forgets the rows of sequences that have ended, when no step is in flight."""
        self.state.end(self._plans.end_rows())
