"""What a sequence asks of the sampler: the same at each of its steps, so it is made ready once."""

from __future__ import annotations

import msgspec
import numpy as np

from shared.messages import SamplingParams

ROW_TYPE = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int64),
        ("choice_index", np.int64),
        ("seed", np.uint64),
    ]
)


class SamplingRow(msgspec.Struct, frozen=True):
    packed: bytes  # one of ROW_TYPE: a step joins those of its rows
    has_extras: bool  # bans, bias, penalties or logprobs, which a step looks at one by one


def sampling_row(params: SamplingParams, choice_index: int) -> SamplingRow:
    """Of parameters that `check_sampling` let in."""
    row = (params.temperature, params.top_p, params.min_p, params.top_k, choice_index, params.seed)
    is_penalized = params.repetition_penalty != 1 or bool(
        params.frequency_penalty or params.presence_penalty
    )
    has_bans = bool(params.bad_words or params.min_tokens)
    has_extras = has_bans or is_penalized or bool(params.logit_bias)
    return SamplingRow(
        np.array([row], dtype=ROW_TYPE).tobytes(), has_extras or params.num_logprobs is not None
    )
