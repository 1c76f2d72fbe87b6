"""Which sampling parameters a step can take; the vocabulary is `Worker.check_tokens`'s business."""

from __future__ import annotations

from itertools import chain

import numpy as np

from shared.errors import InvalidRequest
from shared.messages import SamplingParams

MAX_LOGPROBS = 20
LEAST, LARGEST = (float(limit) for limit in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


def check_sampling(params: SamplingParams) -> None:
    """Raises InvalidRequest for what logits cannot bear or nobody may ask for."""
    if not 0 <= params.seed < 2**64:
        raise InvalidRequest(f"seed {params.seed} is not an unsigned 64-bit integer", param="seed")
    if params.top_k >= 2**63:
        raise InvalidRequest(f"top_k {params.top_k} is not a signed 64-bit integer", param="top_k")
    if not all(params.bad_words):
        raise InvalidRequest("a bad word has no tokens", param="bad_words")
    _check_penalties(params)
    _check_num_logprobs("num_logprobs", params.num_logprobs)
    _check_num_logprobs("num_prompt_logprobs", params.num_prompt_logprobs)


def _check_penalties(params: SamplingParams) -> None:
    penalties = (params.frequency_penalty, params.presence_penalty)
    for value in chain(penalties, (value for _, value in params.logit_bias)):
        if not abs(value) <= LARGEST:  # so that NaN is refused, too
            raise InvalidRequest(f"a penalty or bias of {value} is not a finite FP32 number")
    if not LEAST <= params.repetition_penalty <= LARGEST:
        raise InvalidRequest(
            f"repetition_penalty {params.repetition_penalty} is not a positive FP32 number",
            param="repetition_penalty",
        )


def _check_num_logprobs(name: str, count: int | None) -> None:
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequest(f"{name} {count} is not within 0 to {MAX_LOGPROBS}", param=name)
