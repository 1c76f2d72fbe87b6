"""The inputs of a step from the sequences themselves, row by row: what plans must amount to."""

from __future__ import annotations

import numpy as np

from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.batching.sequence import Sequence
from shared.engine.executors.special_rows import SpecialRow, has_extras, sampling_extras
from shared.engine.step import (
    PoolingInputs,
    PromptSuccessors,
    SamplingInputs,
    StepInputs,
    sampling_rows,
)

OPTIONS = ("temperature", "top_p", "min_p", "top_k", "seed")


UNKNOWN = -1  # a token that a step in flight draws


def plain_inputs(rows: list[ScheduledSequence], block_size: int) -> StepInputs:
    """Returns the inputs of a step. Shapes are as in `StepInputs`; sequences keep the
    order of `rows`.
    """
    chunks = [range(row.start, row.start + row.num_scheduled_tokens) for row in rows]
    groups = range(len(rows[0].sequence.block_tables))
    tables = [[row.sequence.block_tables[group] for row in rows] for group in groups]
    width = max(len(table) for of_group in tables for table in of_group)
    padded = [[[*table, *[0] * (width - len(table))] for table in each] for each in tables]
    ids = [
        row.sequence.token_ids[p] if p < row.sequence.num_tokens else UNKNOWN
        for row, chunk in zip(rows, chunks, strict=True)
        for p in chunk
    ]
    slots = [
        [
            table[position // block_size] * block_size + position % block_size
            for table, chunk in zip(of_group, chunks, strict=True)
            for position in chunk
        ]
        for of_group in tables
    ]
    return StepInputs(
        input_ids=_integers(ids),
        positions=_integers([position for chunk in chunks for position in chunk]),
        slot_mapping=_integers(slots),
        query_lens=_integers([len(chunk) for chunk in chunks]),
        context_lens=_integers([chunk.stop for chunk in chunks]),
        block_tables=_integers(padded),
        sampling=_sampling(rows, np.cumsum([len(chunk) for chunk in chunks]) - 1),
        block_copies=tuple(copy for row in rows for copy in row.block_copies),
        prompt_logprobs=_prompt_logprobs(rows, chunks),
        pooling=_pooling(rows),
    )


def _integers(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _sampling(rows: list[ScheduledSequence], last: np.ndarray) -> SamplingInputs:
    indices = [index for index, row in enumerate(rows) if row.samples]
    sequences = [rows[index].sequence for index in indices]
    num_outputs = [_num_output_tokens(rows[index]) for index in indices]
    params = [each.sampling for each in sequences]
    assert all(each is not None for each in params)
    requesting = [
        (row, _special(each, num_outputs[row]), each.sampling)
        for row, each in enumerate(sequences)
        if has_extras(each.sampling, has_grammar=each.grammar is not None)
    ]
    return SamplingInputs(
        logits_indices=_integers(last[indices]),
        rows=sampling_rows(
            len(sequences),
            **{name: [getattr(each, name) for each in params] for name in OPTIONS},
            choice_index=[each.choice_index for each in sequences],
            output_position=num_outputs,
        ),
        **(sampling_extras(requesting) if requesting else {}),
    )


def _num_output_tokens(row: ScheduledSequence) -> int:
    """Returns the number of output tokens once the earlier steps have sampled."""
    return row.start + row.num_scheduled_tokens - row.sequence.num_prompt_tokens


def _special(sequence: Sequence, num_output_tokens: int) -> SpecialRow:
    grammar = sequence.grammar
    mask = None if grammar is None else grammar.mask()
    return SpecialRow(
        sequence.sampling,
        sequence.pooling,
        sequence.num_prompt_tokens,
        tuple(sequence.stop_token_ids),
        sequence.token_ids,
        num_output_tokens=num_output_tokens,
        mask=mask,
        bans_stop=grammar is not None and mask is None and grammar.bans_stop,
    )


def _prompt_logprobs(
    rows: list[ScheduledSequence], chunks: list[range]
) -> dict[int, PromptSuccessors]:
    found = {}
    for index, (row, chunk) in enumerate(zip(rows, chunks, strict=True)):
        sequence = row.sequence
        if sequence.prompt_logprobs is None or sequence.num_prompt_logprobs is None:
            continue
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        if sequence.next_token_id is not None:
            prompt.append(sequence.next_token_id)
        if successors := prompt[chunk.start + 1 : chunk.stop + 1]:
            found[index] = PromptSuccessors(_integers(successors), sequence.num_prompt_logprobs)
    return found


def _pooling(rows: list[ScheduledSequence]) -> dict[int, PoolingInputs]:
    """Returns the pooling of rows. A mean needs every chunk; the last token is in the last chunk.
    The sum before it is known if no step in flight computes it.
    """
    return {
        index: PoolingInputs(row.sequence.pooling, _pooled_before(row))
        for index, row in enumerate(rows)
        if row.sequence.pooling == "mean" or (row.sequence.pooling is not None and row.completes)
    }


def _pooled_before(row: ScheduledSequence) -> np.ndarray | None:
    is_known = 0 < row.start == row.sequence.num_computed_tokens
    return row.sequence.pooled if is_known else None
