"""Builds the flat arrays that an executor computes with from the rows of a step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, Protocol

import numpy as np

from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.batching.sequence import Sequence
from shared.engine.sampling.token_counts import TokenCounts
from shared.engine.step import (
    LogitBias,
    Penalties,
    PoolingInputs,
    PromptSuccessors,
    SamplingInputs,
    StepInputs,
    TokenMask,
    TokenMasks,
)
from shared.messages import LogprobsMode, SamplingParams


class SampledSequence(Protocol):
    """What sampling needs to know of a sequence beside its parameters."""

    token_ids: list[int]
    num_prompt_tokens: int
    counts: TokenCounts

    @property
    def num_output_tokens(self) -> int: ...
    @property
    def stop_token_ids(self) -> Iterable[int]: ...
    @property
    def grammar(self) -> SampledGrammar | None: ...


class SampledGrammar(Protocol):
    @property
    def bans_stop(self) -> bool: ...
    def mask(self) -> TokenMask | None: ...


SampledRow = tuple[int, SampledSequence, SamplingParams]  # its row among those that sample

SAMPLING_ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int64),
        ("choice_index", np.int64),
        ("seed", np.uint64),
    ]
)


def build_inputs(rows: list[ScheduledSequence], block_size: int) -> StepInputs:
    """Shapes as in `StepInputs`; sequences keep the order of `rows`."""
    sequences = [row.sequence for row in rows]
    num_scheduled = [row.num_scheduled_tokens for row in rows]
    num_computed = [each.num_computed_tokens for each in sequences]
    input_ids: list[int] = []
    for sequence, start, count in zip(sequences, num_computed, num_scheduled, strict=True):
        if count == 1:
            input_ids.append(sequence.token_ids[start])
        else:
            input_ids += sequence.token_ids[start : start + count]
    query_lens, computed = np.array((num_scheduled, num_computed), dtype=np.int64)
    context_lens = computed + query_lens
    block_tables = _block_tables(sequences)  # [G, S, max_blocks]
    row_of_token, positions, last_rows = _places(query_lens, computed, len(input_ids))
    block_indices, offsets = np.divmod(positions, block_size)
    return StepInputs(
        input_ids=np.array(input_ids, dtype=np.int64),
        positions=positions,
        slot_mapping=_slots(block_tables, row_of_token, block_indices) * block_size + offsets,
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=block_tables,
        sampling=_sampling_inputs(rows, last_rows, context_lens),
        block_copies=_block_copies(rows),
        prompt_logprobs=_prompt_logprobs(rows),
        pooling=_pooling(rows),
    )


def _block_tables(sequences: list[Sequence]) -> np.ndarray:
    """Joined as bytes, because copying row by row into an array takes three times as long."""
    num_groups = len(sequences[0].block_tables)
    if num_groups == 1:
        tables = [each.block_tables[0].tobytes() for each in sequences]
    else:
        by_sequence = [[table.tobytes() for table in each.block_tables] for each in sequences]
        tables = list(chain.from_iterable(zip(*by_sequence, strict=True)))
    width = max(map(len, tables))
    joined = b"".join([each.ljust(width, b"\0") for each in tables])
    return np.frombuffer(joined, dtype=np.int64).reshape(num_groups, len(sequences), -1).copy()


def _slots(
    block_tables: np.ndarray, row_of_token: np.ndarray, block_indices: np.ndarray
) -> np.ndarray:
    """[G, T] the block of each token; one gather for all groups."""
    if len(block_tables) == 1:  # a view: half the time of a gather in three dimensions
        blocks: np.ndarray = block_tables[0][row_of_token, block_indices]
        return blocks[None]
    num_rows, width = block_tables.shape[1:]
    flat = block_tables.reshape(len(block_tables), num_rows * width)
    return flat.take(row_of_token * width + block_indices, axis=1)


def _block_copies(rows: list[ScheduledSequence]) -> tuple[tuple[int, int], ...]:
    copies = [row.block_copies for row in rows if row.block_copies]
    return tuple(chain.from_iterable(copies)) if copies else ()


def _places(
    query_lens: np.ndarray, computed: np.ndarray, num_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the row [T] and position [T] of each token, and each row's last index in T [S]."""
    index = np.arange(len(query_lens))
    if num_tokens == len(query_lens):  # a decode step: one token per row
        return index, computed, index
    ends = query_lens.cumsum()
    row_of_token = index.repeat(query_lens)
    positions = np.arange(num_tokens) + (computed - ends + query_lens)[row_of_token]
    return row_of_token, positions, ends - 1


def _sampling_inputs(
    rows: list[ScheduledSequence], last_rows: np.ndarray, context_lens: np.ndarray
) -> SamplingInputs:
    indices = [index for index, row in enumerate(rows) if row.samples]
    sampled = [rows[index].sequence for index in indices]
    prepared = [each.packed_sampling or _pack_sampling(each) for each in sampled]
    packed = np.frombuffer(b"".join([row for row, _ in prepared]), dtype=SAMPLING_ROW)
    # one call for both: for a few rows, creating an array costs more than filling it
    sampled_rows, num_prompt_tokens = np.array(
        (indices, [sequence.num_prompt_tokens for sequence in sampled]), dtype=np.int64
    )
    requesting: list[SampledRow] = [
        (row, sequence, sequence.sampling)
        for row, sequence in enumerate(sampled)
        if prepared[row][1] and sequence.sampling is not None
    ]
    return SamplingInputs(
        logits_indices=last_rows[sampled_rows],
        temperature=packed["temperature"].copy(),
        top_k=packed["top_k"].copy(),
        top_p=packed["top_p"].copy(),
        min_p=packed["min_p"].copy(),
        seed=packed["seed"].copy(),
        choice_index=packed["choice_index"].copy(),
        output_position=context_lens[sampled_rows] - num_prompt_tokens,
        **(sampling_extras(requesting) if requesting else {}),
    )


def _pack_sampling(sequence: Sequence) -> tuple[bytes, bool]:
    """`Sequence.packed_sampling`, made once: sampling is the same at each step of a sequence."""
    params = sequence.sampling
    assert params is not None
    packed = np.array([sampling_row(params, sequence.choice_index)], dtype=SAMPLING_ROW).tobytes()
    sequence.packed_sampling = (packed, has_extras(params, sequence.grammar))
    return sequence.packed_sampling


def sampling_row(params: SamplingParams, choice_index: int) -> tuple[float | int, ...]:
    """The fields of `SAMPLING_ROW`."""
    return (
        params.temperature,
        params.top_p,
        params.min_p,
        params.top_k,
        choice_index,
        params.seed,
    )


def has_extras(params: SamplingParams, grammar: object | None) -> bool:
    """Whether `sampling_extras` needs its rows."""
    return (
        bool(params.bad_words or params.min_tokens or params.logit_bias)
        or params.is_penalized
        or params.num_logprobs is not None
        or grammar is not None
    )


def sampling_extras(requesting: list[SampledRow]) -> dict[str, Any]:
    """Returns the fields that are empty unless a row needs them."""
    masks = _masks(requesting)
    return {
        "banned": [
            (row, token_id)
            for row, sequence, params in requesting
            for token_id in _banned(sequence, params, is_masked=row in masks)
        ],
        "masks": _token_masks(masks),
        "bias": _bias(requesting),
        "penalties": _penalties(requesting),
        "raw_logprobs": _num_logprobs(requesting, "raw"),
        "processed_logprobs": _num_logprobs(requesting, "processed"),
    }


def _banned(sequence: SampledSequence, params: SamplingParams, *, is_masked: bool) -> list[int]:
    """Returns token ids, possibly with duplicates."""
    banned = [word[-1] for word in params.bad_words if _ends_with(sequence.token_ids, word[:-1])]
    bans_stop = sequence.num_output_tokens < params.min_tokens
    if sequence.grammar is not None and not is_masked:
        bans_stop = bans_stop or sequence.grammar.bans_stop
    if bans_stop:
        banned += sequence.stop_token_ids
    return banned


def _ends_with(token_ids: list[int], tail: tuple[int, ...]) -> bool:
    """Compares the last token first, which suffices for most bad words."""
    if not tail:
        return True
    return token_ids[-1] == tail[-1] and tuple(token_ids[-len(tail) :]) == tail


def _masks(requesting: list[SampledRow]) -> dict[int, TokenMask]:
    return {
        row: mask
        for row, sequence, _ in requesting
        if sequence.grammar is not None and (mask := sequence.grammar.mask()) is not None
    }


def _token_masks(masks: dict[int, TokenMask]) -> TokenMasks | None:
    if not masks:
        return None
    return TokenMasks(np.array(list(masks), dtype=np.int64), tuple(masks.values()))


def _bias(requesting: list[SampledRow]) -> LogitBias | None:
    entries = [(row, *pair) for row, _, params in requesting for pair in params.logit_bias]
    if not entries:
        return None
    rows, token_ids, values = zip(*entries, strict=True)
    return LogitBias(
        rows=np.array(rows, dtype=np.int64),
        token_ids=np.array(token_ids, dtype=np.int64),
        values=np.array(values, dtype=np.float32),
    )


def _penalties(requesting: list[SampledRow]) -> Penalties | None:
    penalized = [
        _penalties_of(row, sequence, params)
        for row, sequence, params in requesting
        if params.is_penalized
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
    row: int, sequence: SampledSequence, params: SamplingParams
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


def _num_logprobs(requesting: list[SampledRow], mode: LogprobsMode) -> dict[int, int]:
    return {
        row: params.num_logprobs
        for row, _, params in requesting
        if params.num_logprobs is not None and params.logprobs_mode == mode
    }


def _prompt_logprobs(rows: list[ScheduledSequence]) -> dict[int, PromptSuccessors]:
    """Returns the successors of chunks whose tokens are followed by prompt tokens."""
    found: dict[int, PromptSuccessors] = {}
    for index, row in enumerate(rows):
        sequence = row.sequence
        if sequence.prompt_logprobs is None or sequence.num_prompt_logprobs is None:
            continue
        successors = successors_of(
            sequence, sequence.num_computed_tokens + 1, row.num_scheduled_tokens
        )
        if successors:
            token_ids = np.array(successors, dtype=np.int64)
            found[index] = PromptSuccessors(token_ids, sequence.num_prompt_logprobs)
    return found


def successors_of(sequence: Sequence, first: int, num_tokens: int) -> list[int]:
    """The prompt tokens in [first, first + num_tokens)."""
    end = first + num_tokens
    successors = sequence.token_ids[first : min(end, sequence.num_prompt_tokens)]
    if sequence.next_token_id is not None and end > sequence.num_prompt_tokens:
        successors.append(sequence.next_token_id)
    return successors


def _pooling(rows: list[ScheduledSequence]) -> dict[int, PoolingInputs]:
    """A mean needs every chunk; the last token is in the last chunk."""
    found: dict[int, PoolingInputs] = {}
    for index, row in enumerate(rows):
        sequence = row.sequence
        if sequence.pooling == "mean" or (sequence.pooling is not None and row.completes):
            before = sequence.pooled if sequence.num_computed_tokens else None
            found[index] = PoolingInputs(sequence.pooling, before)
    return found
