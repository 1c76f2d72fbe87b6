"""From the step's rows to the flat arrays that a runner computes with."""

from __future__ import annotations

import numpy as np

from shared.engine.batcher import ScheduledSequence
from shared.engine.runner import (
    LogitBias,
    Penalties,
    PoolingInputs,
    PromptSuccessors,
    SamplingInputs,
    StepInputs,
)
from shared.engine.sequence import Sequence
from shared.messages import LogprobsMode, SamplingParams

Drawing = tuple[Sequence, SamplingParams]


def build_inputs(rows: list[ScheduledSequence], block_size: int) -> StepInputs:
    """Shapes as in `StepInputs`; sequences keep the order of `rows`."""
    input_ids: list[int] = []
    width = max(len(row.sequence.block_table) for row in rows)
    block_tables = np.zeros((len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        sequence, start = row.sequence, row.sequence.num_computed_tokens
        table = sequence.block_table
        block_tables[index, : len(table)] = table
        input_ids += sequence.token_ids[start : start + row.num_scheduled_tokens]
    query_lens = np.array([row.num_scheduled_tokens for row in rows], dtype=np.int64)
    computed = np.array([row.sequence.num_computed_tokens for row in rows], dtype=np.int64)
    ends = query_lens.cumsum()
    row_of_token = np.repeat(np.arange(len(rows)), query_lens)  # [T]
    positions = np.arange(len(input_ids)) + (computed - ends + query_lens)[row_of_token]
    blocks = block_tables[row_of_token, positions // block_size]
    return StepInputs(
        input_ids=np.array(input_ids, dtype=np.int64),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        query_lens=query_lens,
        context_lens=computed + query_lens,
        block_tables=block_tables,
        sampling=_sampling_inputs(rows, ends - 1),
        block_copies=tuple(row.block_copy for row in rows if row.block_copy is not None),
        prompt_logprobs=_prompt_logprobs(rows),
        pooling=_pooling(rows),
    )


def _sampling_inputs(rows: list[ScheduledSequence], last_rows: np.ndarray) -> SamplingInputs:
    drawing: list[Drawing] = []
    drawing_rows: list[int] = []
    for index, row in enumerate(rows):
        if row.samples and row.sequence.sampling is not None:
            drawing.append((row.sequence, row.sequence.sampling))
            drawing_rows.append(index)
    sequences = [sequence for sequence, _ in drawing]
    params = [each for _, each in drawing]
    return SamplingInputs(
        logits_indices=last_rows[np.array(drawing_rows, dtype=np.int64)],
        temperature=np.array([each.temperature for each in params], dtype=np.float32),
        top_k=np.array([each.top_k for each in params], dtype=np.int64),
        top_p=np.array([each.top_p for each in params], dtype=np.float32),
        min_p=np.array([each.min_p for each in params], dtype=np.float32),
        seed=np.array([each.seed for each in params], dtype=np.uint64),
        choice_index=np.array([each.choice_index for each in sequences], dtype=np.int64),
        output_position=np.array([each.num_output_tokens for each in sequences], dtype=np.int64),
        banned=[
            (draw, token_id)
            for draw, (sequence, each) in enumerate(drawing)
            if each.bad_words or each.min_tokens
            for token_id in _banned(sequence, each)
        ],
        bias=_bias(params),
        penalties=_penalties(drawing),
        raw_logprobs=_num_logprobs(params, "raw"),
        processed_logprobs=_num_logprobs(params, "processed"),
    )


def _banned(sequence: Sequence, params: SamplingParams) -> list[int]:
    """May hold a token twice."""
    banned = [word[-1] for word in params.bad_words if _ends_with(sequence.token_ids, word[:-1])]
    if sequence.num_output_tokens < params.min_tokens:
        banned += sequence.stop_token_ids
    return banned


def _ends_with(token_ids: list[int], tail: tuple[int, ...]) -> bool:
    """The last token is compared first: most bad words need no more."""
    if not tail:
        return True
    return token_ids[-1] == tail[-1] and tuple(token_ids[-len(tail) :]) == tail


def _bias(params: list[SamplingParams]) -> LogitBias | None:
    entries = [(row, *pair) for row, each in enumerate(params) for pair in each.logit_bias]
    if not entries:
        return None
    rows, token_ids, values = zip(*entries, strict=True)
    return LogitBias(
        rows=np.array(rows, dtype=np.int64),
        token_ids=np.array(token_ids, dtype=np.int64),
        values=np.array(values, dtype=np.float32),
    )


def _penalties(drawing: list[Drawing]) -> Penalties | None:
    penalized = [
        _penalties_of(row, sequence, params)
        for row, (sequence, params) in enumerate(drawing)
        if params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty
    ]
    if not penalized:
        return None
    rows, token_ids, repetition, subtracted = zip(*penalized, strict=True)
    return Penalties(
        rows=np.concatenate(rows),
        token_ids=np.concatenate(token_ids),
        repetition=np.concatenate(repetition),
        subtracted=np.concatenate(subtracted),
    )


def _penalties_of(
    row: int, sequence: Sequence, params: SamplingParams
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """One row's part of each field of `Penalties`."""
    counts = sequence.counts
    counts.advance(sequence.token_ids, sequence.num_prompt_tokens)
    token_ids, in_output = counts.token_ids(), counts.in_output()
    by_count = params.frequency_penalty * in_output + params.presence_penalty * (in_output > 0)
    return (
        np.full(len(token_ids), row, dtype=np.int64),
        token_ids,
        np.full(len(token_ids), params.repetition_penalty, dtype=np.float32),
        by_count.astype(np.float32),
    )


def _num_logprobs(params: list[SamplingParams], mode: LogprobsMode) -> dict[int, int]:
    return {
        row: each.num_logprobs
        for row, each in enumerate(params)
        if each.num_logprobs is not None and each.logprobs_mode == mode
    }


def _prompt_logprobs(rows: list[ScheduledSequence]) -> dict[int, PromptSuccessors]:
    """Of chunks whose tokens have prompt tokens behind them."""
    found: dict[int, PromptSuccessors] = {}
    for index, row in enumerate(rows):
        sequence = row.sequence
        if sequence.prompt_logprobs is None or sequence.num_prompt_logprobs is None:
            continue
        first = sequence.num_computed_tokens + 1
        end = first + row.num_scheduled_tokens
        successors = sequence.token_ids[first : min(end, sequence.num_prompt_tokens)]
        if sequence.next_token_id is not None and end > sequence.num_prompt_tokens:
            successors.append(sequence.next_token_id)
        if successors:
            token_ids = np.array(successors, dtype=np.int64)
            found[index] = PromptSuccessors(token_ids, sequence.num_prompt_logprobs)
    return found


def _pooling(rows: list[ScheduledSequence]) -> dict[int, PoolingInputs]:
    """A mean is of every chunk; the last token comes with the last chunk."""
    found: dict[int, PoolingInputs] = {}
    for index, row in enumerate(rows):
        sequence = row.sequence
        if sequence.pooling == "mean" or (sequence.pooling is not None and row.completes):
            before = sequence.pooled if sequence.num_computed_tokens else None
            found[index] = PoolingInputs(sequence.pooling, before)
    return found
