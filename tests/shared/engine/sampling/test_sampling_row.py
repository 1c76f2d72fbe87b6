from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shared.engine.sampling.sampling_row import ROW_TYPE, sampling_row
from shared.messages import SamplingParams

PLAIN: dict[str, Any] = {"seed": 2**64 - 1, "max_tokens": 9, "temperature": 0.5, "top_k": 3}


def test_a_row_holds_what_every_step_needs() -> None:
    params = SamplingParams(**PLAIN, top_p=0.75, min_p=0.25)
    row = sampling_row(params, 2**63 - 1)
    assert not row.has_extras
    (unpacked,) = np.frombuffer(row.packed, dtype=ROW_TYPE).tolist()
    assert unpacked == (0.5, 0.75, 0.25, 3, 2**63 - 1, 2**64 - 1)


@pytest.mark.parametrize(
    "extra",
    [
        {"bad_words": ((5,),)},
        {"min_tokens": 1},
        {"logit_bias": ((5, 1.0),)},
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
        {"num_logprobs": 0},
    ],
    ids=str,
)
def test_what_a_step_looks_at_one_by_one_is_noted(extra: dict[str, Any]) -> None:
    assert sampling_row(SamplingParams(**PLAIN, **extra), 0).has_extras
