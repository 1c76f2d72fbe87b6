"""Rows that need more than their arrays: what changes their logits, logprobs, and embeddings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.engine.sampling.token_counts import TokenCounts
from shared.engine.step import LogitBias, Penalties, TokenMask, TokenMasks
from shared.messages import LogprobsMode, Pooling, SamplingParams


@dataclass(slots=True)
class SpecialRow:
    """A row with options that few have. `mask` and `bans_stop` are its grammar's at this step;
    `pooled` is the sum over the first `num_pooled_tokens` tokens, as its last chunk gave it.
    """

    sampling: SamplingParams | None
    pooling: Pooling | None
    num_prompt_tokens: int
    stop_token_ids: tuple[int, ...]
    token_ids: list[int]  # all so far if they are needed, else none
    counts: TokenCounts = field(default_factory=TokenCounts)
    num_output_tokens: int = 0
    mask: TokenMask | None = None
    bans_stop: bool = False
    pooled: NDArray[np.float64] | None = None
    num_pooled_tokens: int = 0


SampledRow = tuple[int, SpecialRow, SamplingParams]  # the index counts the rows that sample


def has_extras(params: SamplingParams, *, has_grammar: bool) -> bool:
    """Whether `sampling_extras` needs its rows."""
    return (
        bool(params.bad_words or params.min_tokens or params.logit_bias)
        or params.is_penalized
        or params.num_logprobs is not None
        or has_grammar
    )


def sampling_extras(requesting: list[SampledRow]) -> dict[str, Any]:
    """Returns the fields that are empty unless a row needs them."""
    return {
        "banned": [
            (row, token_id)
            for row, special, params in requesting
            for token_id in _banned(special, params)
        ],
        "masks": _masks(requesting),
        "bias": _bias(requesting),
        "penalties": _penalties(requesting),
        "raw_logprobs": _num_logprobs(requesting, "raw"),
        "processed_logprobs": _num_logprobs(requesting, "processed"),
    }


def _banned(special: SpecialRow, params: SamplingParams) -> list[int]:
    """Returns token ids, possibly with duplicates."""
    banned = [word[-1] for word in params.bad_words if _ends_with(special.token_ids, word[:-1])]
    if special.num_output_tokens < params.min_tokens or special.bans_stop:
        banned += special.stop_token_ids
    return banned


def _ends_with(token_ids: list[int], tail: tuple[int, ...]) -> bool:
    """Compares the last token first, which suffices for most bad words."""
    if not tail:
        return True
    return token_ids[-1] == tail[-1] and tuple(token_ids[-len(tail) :]) == tail


def _masks(requesting: list[SampledRow]) -> TokenMasks | None:
    masks = {row: special.mask for row, special, _ in requesting if special.mask is not None}
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
        _penalties_of(row, special, params)
        for row, special, params in requesting
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
    row: int, special: SpecialRow, params: SamplingParams
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns one row's part of each field of `Penalties`."""
    counts = special.counts
    counts.advance(special.token_ids, special.num_prompt_tokens)
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
