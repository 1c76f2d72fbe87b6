"""A rig whose steps reach the executor as encoded plans, through the states of two ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.engine import StepProgress
from shared.engine.executors.plan_builder import PlanBuilder
from shared.engine.executors.rank_state import RankState
from shared.engine.step import StepInputs, StepOutput
from shared.engine.step_plan import StepResult, decode_plan, decode_result, encode
from shared.engine.token_masks.budgeted_output import ForcedToken
from tests.support.engine.masked import LateMask, ReadyMask
from tests.support.engine.plain_inputs import plain_inputs
from tests.support.engine.rig import BLOCK_SIZE, Rig, finish

PLACES = {  # where submitting a step may raise
    "build": "shared.engine.executors.plan_builder._copies",
    "send": f"{__name__}.encode",
    "add": "shared.engine.executors.rank_state._sampling_row",
    "apply": "shared.engine.executors.rank_state._blocks_of",
}


class PlannedRig(Rig):
    """One rank's tokens are fed, as in a pipeline; the other one keeps those that it draws."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.builders = (PlanBuilder(), PlanBuilder(feeds_sampled=True))
        num_groups = len(self.executor.kv_layout.groups)
        self.ranks = (RankState(BLOCK_SIZE, num_groups), RankState(BLOCK_SIZE, num_groups))
        self.num_plan_bytes: list[int] = []

    def computed(self, rows: list[ScheduledSequence]) -> StepOutput:
        output = finish(self.executor.run(self.planned(rows)))
        answer = decode_result(encode(StepResult(0, output))).output
        for rank in self.ranks:
            rank.record(answer)
        return answer

    def fail(self, rows: list[ScheduledSequence]) -> list[StepProgress]:
        self.planned(rows)  # the step raises after its plan: nothing is sampled
        return super().fail(rows)

    def compute_again(self, rows: list[ScheduledSequence]) -> None:
        """The step has failed after the ranks have computed it. Its rows succeed in two halves."""
        self.computed(rows)
        self._compute_halves(rows)

    def submit_again(self, rows: list[ScheduledSequence], place: str) -> None:
        """Submitting the step raises at this place. Its rows succeed in two halves."""
        for builder, rank in zip(self.builders, self.ranks, strict=True):
            with mock.patch(PLACES[place], side_effect=MemoryError):
                self._try_to_submit(rows, builder, rank)
        self._compute_halves(rows)

    def _try_to_submit(
        self, rows: list[ScheduledSequence], builder: PlanBuilder, rank: RankState
    ) -> None:
        try:
            plan, masks = builder.build(rows)
        except MemoryError:
            return
        try:
            rank.apply(decode_plan(encode(plan)), masks)
        except MemoryError:
            builder.take_back(plan, rows)

    def _compute_halves(self, rows: list[ScheduledSequence]) -> None:
        rows = self.engine.take_back(rows)
        half = len(rows) // 2
        for part in (rows[:half], rows[half:]):
            if part:
                self._record(self.engine.apply(part, self.computed(part)))
        self.rows = []
        self.check()

    def planned(self, rows: list[ScheduledSequence]) -> StepInputs:
        """Returns the inputs of a rank, which equal those built from the sequences."""
        expected = plain_inputs(rows, BLOCK_SIZE)
        for builder, rank in zip(self.builders, self.ranks, strict=True):
            plan, masks = builder.build(rows)
            payload = encode(plan)
            self.num_plan_bytes.append(len(payload))
            inputs = rank.apply(decode_plan(payload), masks)
            assert comparable(inputs) == comparable(expected)
        return inputs


def comparable(value: Any) -> Any:
    """Returns values that `==` compares: with dtypes and shapes of arrays, and the values of
    masks.
    """
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tolist()
    if isinstance(value, ReadyMask | LateMask | ForcedToken):
        return type(value), comparable(value.wait(0.0))
    if isinstance(value, msgspec.Struct):
        return {name: comparable(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {key: comparable(each) for key, each in value.items()}
    if hasattr(value, "__slots__"):
        return {name: comparable(getattr(value, name)) for name in value.__slots__}
    if isinstance(value, tuple | list):
        return [comparable(each) for each in value]
    return value
