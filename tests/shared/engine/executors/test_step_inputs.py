"""Scheduled rows become the flat arrays of a step."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from shared.engine.batching.sequence import Sequence
from shared.engine.step import SAMPLING_ROW
from shared.messages import SamplingParams
from tests.support.engine.rig import greedy, inputs_of, new_sequence, row_of


def sequence_with(
    token_ids: list[int],
    sampling: SamplingParams | None,
    *,
    block_table: list[int],
    num_computed_tokens: int,
    output_ids: tuple[int, ...] = (),
    stop: tuple[int, ...] = (),
    choice_index: int = 0,
) -> Sequence:
    sequence = new_sequence(
        token_ids, sampling, output_ids=output_ids, stop=stop, choice_index=choice_index
    )
    sequence.block_tables = [array("q", block_table)]
    sequence.num_computed_tokens = num_computed_tokens
    return sequence


def test_mixed_step_fills_all_arrays() -> None:
    sampled = SamplingParams(
        seed=2**64 - 1, max_tokens=9, temperature=0.5, top_k=3, top_p=0.75, min_p=0.25, min_tokens=3
    )
    decode = sequence_with(
        [10, 11, 12, 13],
        sampled,
        block_table=[7, 2],
        num_computed_tokens=5,
        output_ids=(14, 15),
        stop=(3,),
        choice_index=1,
    )
    chunk = sequence_with(
        list(range(20, 32)), greedy(), block_table=[5, 0, 9], num_computed_tokens=2, stop=(3,)
    )
    first = sequence_with([40, 41], greedy(), block_table=[1], num_computed_tokens=0, stop=(4,))
    pushed = sequence_with([50, 51], None, block_table=[3], num_computed_tokens=1)
    rows = [
        row_of(decode, 1),
        row_of(chunk, 3),
        row_of(first, 2),
        row_of(pushed, 1),
    ]
    inputs = inputs_of(rows)

    assert inputs.input_ids.tolist() == [15, 22, 23, 24, 40, 41, 51]
    assert inputs.positions.tolist() == [5, 2, 3, 4, 0, 1, 1]
    assert inputs.slot_mapping.tolist() == [[9, 22, 23, 0, 4, 5, 13]]
    assert inputs.query_lens.tolist() == [1, 3, 2, 1]
    assert inputs.context_lens.tolist() == [6, 5, 2, 2]
    assert inputs.block_tables.tolist() == [[[7, 2, 0], [5, 0, 9], [1, 0, 0], [3, 0, 0]]]

    sampling = inputs.sampling
    assert sampling.num_rows == 2
    assert sampling.logits_indices.tolist() == [0, 5]
    assert sampling.rows["temperature"].tolist() == [0.5, 0.0]
    assert sampling.rows["top_k"].tolist() == [3, 0]
    assert sampling.rows["top_p"].tolist() == [0.75, 1.0]
    assert sampling.rows["min_p"].tolist() == [0.25, 0.0]
    assert sampling.rows["seed"].tolist() == [2**64 - 1, 0]
    assert sampling.rows["choice_index"].tolist() == [1, 0]
    assert sampling.rows["output_position"].tolist() == [2, 0]
    assert sampling.banned == [(0, 3)]  # row 0 has 2 of 3 minimum tokens; row 1 may stop at once


def test_chunk_step_has_no_sampling_rows() -> None:
    chunk = sequence_with([1, 2, 3, 4], greedy(), block_table=[0], num_computed_tokens=0)
    inputs = inputs_of([row_of(chunk, 3)])
    assert inputs.sampling.num_rows == 0
    assert inputs.sampling.banned == []


def test_dtypes_are_correct_even_when_empty() -> None:
    chunk = sequence_with([1, 2], greedy(), block_table=[0], num_computed_tokens=0)
    for num_tokens in (1, 2):
        inputs = inputs_of([row_of(chunk, num_tokens)])
        flat = (inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.query_lens)
        assert {array.dtype for array in flat} == {np.dtype(np.int64)}
        assert inputs.context_lens.dtype == inputs.block_tables.dtype == np.int64
        sampling = inputs.sampling
        assert sampling.logits_indices.dtype == np.int64
        assert sampling.rows.dtype == SAMPLING_ROW


def test_arrays_are_copies_of_the_sequences_data() -> None:
    chunk = sequence_with([1, 2], greedy(), block_table=[6], num_computed_tokens=0)
    inputs = inputs_of([row_of(chunk, 2)])
    chunk.block_tables[0][0] = 1
    chunk.token_ids[0] = 99
    assert inputs.block_tables.tolist() == [[[6]]]
    assert inputs.input_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"bad_words": ((5,),)}, "banned"),
        ({"min_tokens": 1}, "banned"),
        ({"logit_bias": ((5, 1.0),)}, "bias"),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"frequency_penalty": 0.1}, "penalties"),
        ({"presence_penalty": -0.1}, "penalties"),
        ({"num_logprobs": 0}, "raw_logprobs"),
    ],
    ids=str,
)
def test_each_extra_sampling_option_sets_its_field(extra: dict[str, Any], field: str) -> None:
    params = SamplingParams(seed=1, max_tokens=9, **extra)
    sequence = sequence_with([10, 11], params, block_table=[1], num_computed_tokens=0, stop=(3,))
    assert getattr(inputs_of([row_of(sequence, 2)]).sampling, field)


def test_each_group_has_its_own_table_and_slots() -> None:
    first = sequence_with([1, 2, 3, 4, 5, 6], greedy(), block_table=[6, 2], num_computed_tokens=5)
    second = sequence_with([1, 2], greedy(), block_table=[5], num_computed_tokens=0)
    first.block_tables.append(array("q", [0, 9]))
    second.block_tables.append(array("q", [8]))
    inputs = inputs_of([row_of(first, 1), row_of(second, 2)])
    assert inputs.block_tables.tolist() == [[[6, 2], [5, 0]], [[0, 9], [8, 0]]]
    assert inputs.slot_mapping.tolist() == [[9, 20, 21], [37, 32, 33]]
