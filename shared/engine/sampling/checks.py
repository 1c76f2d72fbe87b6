"""Checks sampling parameters; `EngineWorker.check_tokens` checks them against the vocabulary."""

from __future__ import annotations

from itertools import chain

import numpy as np

from shared.errors import InvalidRequest
from shared.messages import SamplingParams

MAX_LOGPROBS = 20
# Checked at every step of the request.
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 32
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
LEAST, LARGEST = (float(limit) for limit in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


def check_sampling(params: SamplingParams) -> None:
    """Raises InvalidRequest for values out of range."""
    if not 0 <= params.seed < 2**64:
        raise InvalidRequest(f"seed {params.seed} is not an unsigned 64-bit integer", param="seed")
    if params.top_k >= 2**63:
        raise InvalidRequest(f"top_k {params.top_k} is not a signed 64-bit integer", param="top_k")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"{len(params.stop_token_ids)} stop_token_ids, more than {MAX_STOP_TOKEN_IDS}",
            param="stop_token_ids",
        )
    _check_range("temperature", params.temperature, LARGEST)
    _check_range("top_p", params.top_p, 1.0)
    _check_range("min_p", params.min_p, 1.0)
    _check_bad_words(params.bad_words)
    _check_penalties(params)
    _check_num_logprobs("num_logprobs", params.num_logprobs)
    _check_num_logprobs("num_prompt_logprobs", params.num_prompt_logprobs)


def _check_range(name: str, value: float, largest: float) -> None:
    if not 0 <= value <= largest:  # so that NaN is rejected, too
        raise InvalidRequest(f"{name} {value} is not within 0 to {largest:g}", param=name)


def _check_bad_words(bad_words: tuple[tuple[int, ...], ...]) -> None:
    if len(bad_words) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"{len(bad_words)} bad words, more than {MAX_BAD_WORDS}", param="bad_words"
        )
    for word in bad_words:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"a bad word has {len(word)} tokens, not 1 to {MAX_BAD_WORD_TOKENS}",
                param="bad_words",
            )


def _check_penalties(params: SamplingParams) -> None:
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias names {len(params.logit_bias)} tokens, more than {MAX_LOGIT_BIAS}",
            param="logit_bias",
        )
    penalties = (params.frequency_penalty, params.presence_penalty)
    for value in chain(penalties, (value for _, value in params.logit_bias)):
        if not abs(value) <= LARGEST:  # so that NaN is rejected, too
            raise InvalidRequest(f"a penalty or bias of {value} is not a finite FP32 number")
    if not LEAST <= params.repetition_penalty <= LARGEST:
        raise InvalidRequest(
            f"repetition_penalty {params.repetition_penalty} is not a positive FP32 number",
            param="repetition_penalty",
        )


def _check_num_logprobs(name: str, count: int | None) -> None:
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequest(f"{name} {count} is not within 0 to {MAX_LOGPROBS}", param=name)
