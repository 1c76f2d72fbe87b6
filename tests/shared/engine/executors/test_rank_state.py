"""A rank that applies encoded plans computes with the inputs that the sequences themselves give."""

from __future__ import annotations

from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from shared.engine.batching.sequence import ImageVectors, SequenceGrammar
from shared.engine.executors.plan_builder import PlanBuilder
from shared.engine.executors.rank_state import RankState
from shared.engine.step import StepOutput
from shared.engine.step_plan import Fed, Grown, NewRow, StepPlan, decode_plan, encode, pack
from shared.errors import StepFailed
from shared.messages import SamplingParams
from tests.shared.engine.test_engine_operations import PROMPTS, EngineMachine
from tests.support.engine.planned_rig import PLACES, PlannedRig
from tests.support.engine.rig import BLOCK_SIZE, Rig, greedy, new_sequence, prompt, solo


class PlannedMachine(EngineMachine):
    """Random operations with forks, preemptions, aborts, chunks, masks and failed steps."""

    rig_type = PlannedRig

    @rule(ids=PROMPTS, pooling=st.sampled_from(["mean", "last"]))
    def embed(self, ids: list[int], pooling: str) -> None:
        self.rig.add(new_sequence(ids, None, pooling=pooling))

    @precondition(lambda self: self.rows)
    @rule()
    def compute_again(self) -> None:
        self.rig.compute_again(self.rows)
        self.rows = []

    @precondition(lambda self: self.rows)
    @rule(place=st.sampled_from(sorted(PLACES)))
    def submit_again(self, place: str) -> None:
        self.rig.submit_again(self.rows, place)
        self.rows = []


TestPlannedMachine = PlannedMachine.TestCase
TestPlannedMachine.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


class LongPlannedMachine(PlannedMachine):
    """The same, many times as long."""


TestLongPlannedMachine = pytest.mark.long(LongPlannedMachine.TestCase)
TestLongPlannedMachine.settings = settings(max_examples=2000, stateful_step_count=80, deadline=None)


def test_arrays_grow_with_rows_and_tables() -> None:
    rig = PlannedRig(num_blocks=512, max_batch_tokens=4096, max_sequences=40)
    lengths = [3, 200, *range(2, 40)]
    sequences = [rig.add(new_sequence(prompt(n, start=40 * n), greedy())) for n in lengths]
    rig.run()
    for num_tokens, sequence in zip(lengths, sequences, strict=True):
        ids = tuple(prompt(num_tokens, start=40 * num_tokens))
        assert rig.output(sequence) == solo(ids, greedy())


def test_tables_are_cleared_up_to_the_end_of_a_row_and_small_again_without_rows() -> None:
    rank, num_rows, num_long = RankState(BLOCK_SIZE, 1), 40, 5000

    def step(number: int, row: int, **changes: tuple[NewRow | Grown, ...]) -> list[int]:
        ones = pack([1])
        plan = StepPlan(number, pack([row]), pack([4]), ones, b"\0", **changes)
        return rank.apply(plan).block_tables[0, 0].tolist()

    def new(row: int, num_blocks: int) -> NewRow:
        return NewRow(row, b"", (pack([row + 1] * num_blocks),), 5)

    step(0, 0, new=tuple(new(row, 9) for row in range(num_rows)))
    grown = Grown(3, 0, 9, pack(range(9, num_long)))
    assert step(1, 3, grown=(grown,)) == [4] * 9 + [*range(9, num_long)]
    rank._tables[0, 5, 11:] = 7
    assert step(2, 5, grown=(Grown(5, 0, 9, pack([8])),)) == [6] * 9 + [8]
    assert (rank._tables[0, 5, 11:] == 7).all(), "the row has never been as long"
    rank._tables[0, 5, 11:] = 0
    rank.end(pack([3]))
    assert step(3, 3, new=(new(3, 2),)) == [4] * 2
    assert not rank._tables[0, 3, 2:].any()
    rank.end(pack(range(num_rows)))
    assert rank._tables.nbytes == RankState(BLOCK_SIZE, 1)._tables.nbytes


def test_rank_keeps_nothing_of_a_row_that_has_ended() -> None:
    rank = RankState(BLOCK_SIZE, 1)
    private = SamplingParams(seed=9, max_tokens=4, bad_words=((7,),), logit_bias=((18, 2.0),))
    for row, history in enumerate((pack([3, 4, 5]), b"")):
        new = NewRow(row, b"", (pack([row + 1]),), 2, 0, private if history else greedy())
        one = StepPlan(row, pack([row]), pack([2]), pack([1]), b"\1", new=(new,))
        rank.apply(msgspec.structs.replace(one, fed=(Fed(row, pack([5])),)))
        rank.record(StepOutput([6]))
    rank.end(pack([0]))
    assert rank._special == {}
    assert not any(rank._rows[0].tobytes())
    assert not rank._tables[0, 0].any()
    assert rank._rows["last_id"][1] == 6


def test_decode_plans_do_not_grow_with_the_context() -> None:
    sizes = []
    for num_tokens in (9, 3001):
        rig = PlannedRig(num_blocks=4096, max_batch_tokens=16384)
        for n in range(4):
            rig.add(new_sequence(prompt(num_tokens, start=n), greedy(4)))
        rig.run()
        sizes.append(rig.num_plan_bytes[2])  # of the second step, which feeds no token
    assert sizes[0] == sizes[1] < 80


def test_chunk_that_failed_counts_once_in_a_mean() -> None:
    """A rank records what it computes, also in a step that fails because of another row."""
    rig, whole = PlannedRig(max_batch_tokens=4), PlannedRig()
    sequences = [each.add(new_sequence(prompt(12), None, pooling="mean")) for each in (rig, whole)]
    rig.step()
    rig.compute_again(rig.begin())
    found = []
    for each, sequence in zip((rig, whole), sequences, strict=True):
        each.run()
        found.append(each.endings[sequence.sequence_id].embedding.tolist())
    assert found[0] == found[1]


def test_rank_rejects_a_gap() -> None:
    rig, builder, rank = Rig(), PlanBuilder(), RankState(BLOCK_SIZE, 1)
    rig.add(new_sequence(prompt(5), greedy()))
    rows = rig.begin()
    rank.apply(builder.build(rows)[0])
    builder.build(rows)
    with pytest.raises(StepFailed, match="plan 2 came, expected plan 1"):
        rank.apply(builder.build(rows)[0])


def test_rows_of_a_plan_that_could_not_be_built_are_new_in_the_next() -> None:
    rig, builder, rank = Rig(), PlanBuilder(), RankState(BLOCK_SIZE, 1)
    sequence = rig.add(new_sequence(prompt(5), greedy()))
    sequence.grammar = Mock(SequenceGrammar, is_stalled=False, error=None, bans_stop=False)
    sequence.grammar.mask.side_effect = [RuntimeError("the lane is closed"), None]
    rows, _ = rig.engine.schedule()
    with pytest.raises(RuntimeError, match="closed"):
        builder.build(rows)
    assert rank.apply(*builder.build(rows)).input_ids.tolist() == prompt(5)


@pytest.mark.parametrize("place", sorted(PLACES))
def test_rows_of_a_step_that_was_not_submitted_are_new_in_the_next(place: str) -> None:
    """Their numbers are those of rows that have just ended, which hold other blocks."""
    rig = PlannedRig()
    for start in (100, 200):
        rig.add(new_sequence(prompt(20, start=start), greedy(1)))
    rig.step()
    sequences = [rig.add(new_sequence(prompt(9, start=n), greedy(3))) for n in (300, 400)]
    rig.submit_again(rig.begin(), place)
    rig.run()
    for start, sequence in zip((300, 400), sequences, strict=True):
        assert rig.output(sequence) == solo(tuple(prompt(9, start=start)), greedy(3))


class Vectors:
    """Images of a sequence whose tokens 3, 4 and 7 have vectors."""

    error = None

    def num_ready(self, num_computed: int, start: int, count: int) -> int:
        return count

    def vectors(self, start: int, count: int) -> ImageVectors | None:
        places = np.array([each for each in (3, 4, 7) if start <= each < start + count])
        return ImageVectors(places - start, bytes(places.tolist())) if len(places) else None


def test_vectors_of_images_are_those_of_the_rows_of_a_step() -> None:
    rig = Rig(max_batch_tokens=5 + 9 + 5)  # the last row is cut within its image
    pictures = [new_sequence(prompt(9, start=100 * n), greedy()) for n in (1, 2)]
    for each in pictures:
        each.images = Vectors()
    for each in (new_sequence(prompt(5), greedy()), *pictures):
        rig.add(each)
    rows, _ = rig.engine.schedule()
    plan, _ = PlanBuilder().build(rows)
    embedded = RankState(BLOCK_SIZE, 1).apply(decode_plan(encode(plan))).embedded
    assert embedded is not None
    assert embedded.rows.tolist() == [8, 9, 12, 17, 18]
    assert embedded.vectors == bytes([3, 4, 7, 3, 4])


def test_garbled_plan_raises() -> None:
    rig, builder = Rig(), PlanBuilder()
    rig.add(new_sequence(prompt(5), greedy()))
    payload = encode(builder.build(rig.begin())[0])
    with pytest.raises(msgspec.DecodeError):
        decode_plan(payload[:-1])
