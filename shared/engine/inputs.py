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
    num_scheduled: list[int] = []
    num_computed: list[int] = []
    for row in rows:
        sequence, count = row.sequence, row.num_scheduled_tokens
        start = sequence.num_computed_tokens
        input_ids += sequence.token_ids[start : start + count]
        num_scheduled.append(count)
        num_computed.append(start)
    query_lens, computed = np.array((num_scheduled, num_computed), dtype=np.int64)
    block_tables = _block_tables(rows)
    row_of_token, positions, last_rows = _places(query_lens, computed, len(input_ids))
    blocks = block_tables[row_of_token, positions // block_size]
    return StepInputs(
        input_ids=np.array(input_ids, dtype=np.int64),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        query_lens=query_lens,
        context_lens=computed + query_lens,
        block_tables=block_tables,
        sampling=_sampling_inputs(rows, last_rows),
        block_copies=tuple(row.block_copy for row in rows if row.block_copy is not None),
        prompt_logprobs=_prompt_logprobs(rows),
        pooling=_pooling(rows),
    )


def _block_tables(rows: list[ScheduledSequence]) -> np.ndarray:
    tables = [row.sequence.block_table for row in rows]
    padded = np.zeros((len(rows), max(map(len, tables))), dtype=np.int64)
    for index, table in enumerate(tables):
        padded[index, : len(table)] = table
    return padded


def _places(
    query_lens: np.ndarray, computed: np.ndarray, num_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The row [T] and position [T] of each token, and where in T each row's last token is [S]."""
    index = np.arange(len(query_lens))
    if num_tokens == len(query_lens):  # a step of decode: one token each
        return index, computed, index
    ends = query_lens.cumsum()
    row_of_token = index.repeat(query_lens)
    positions = np.arange(num_tokens) + (computed - ends + query_lens)[row_of_token]
    return row_of_token, positions, ends - 1


def _sampling_inputs(rows: list[ScheduledSequence], last_rows: np.ndarray) -> SamplingInputs:
    drawing: list[Drawing] = []
    drawing_rows: list[int] = []
    for index, row in enumerate(rows):
        if row.samples and row.sequence.sampling is not None:
            drawing.append((row.sequence, row.sequence.sampling))
            drawing_rows.append(index)
    params = [each for _, each in drawing]
    # one call for each type: of a few rows, an array's making costs more than its content
    logits_indices, top_k, choice_index, output_position = np.array(
        (
            drawing_rows,
            [each.top_k for each in params],
            [sequence.choice_index for sequence, _ in drawing],
            [sequence.num_output_tokens for sequence, _ in drawing],
        ),
        dtype=np.int64,
    )
    temperature, top_p, min_p = np.array(
        (
            [each.temperature for each in params],
            [each.top_p for each in params],
            [each.min_p for each in params],
        ),
        dtype=np.float32,
    )
    return SamplingInputs(
        logits_indices=last_rows[logits_indices],
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=np.array([each.seed for each in params], dtype=np.uint64),
        choice_index=choice_index,
        output_position=output_position,
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
