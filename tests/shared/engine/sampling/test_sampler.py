"""Sampling options, compared with a direct implementation of their formulas."""

from __future__ import annotations

import math
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.engine.batching.sequence import Sequence
from shared.engine.sampling.sampler import sample_tokens
from shared.engine.step import SamplingInputs
from shared.messages import SamplingParams
from tests.support.engine.rig import inputs_of, new_sequence, row_of

VOCAB_SIZE = 50
PROMPT, OUTPUT = [3, 4, 4, 9], [9, 7, 7, 7]
INFINITY = float("inf")


def sequence_with(output: list[int] = OUTPUT, **options: Any) -> Sequence:
    stop = options.pop("stop", ())
    params = SamplingParams(**{"seed": 11, "max_tokens": 99, "temperature": 0.0, **options})
    return new_sequence(PROMPT, params, output_ids=output, stop=stop)


def sampling_of(*sequences: Sequence) -> SamplingInputs:
    """Inputs of a step in which each sequence computes its last token and samples."""
    for sequence in sequences:
        sequence.block_tables = [array("q", [0, 1, 2])]
        sequence.num_computed_tokens = sequence.num_tokens - 1
    return inputs_of([row_of(each, 1) for each in sequences]).sampling


def logits_of(num_rows: int, *, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def oracle(row: list[float], sequence: Sequence) -> list[float]:
    """Bias, penalties and bans, one token at a time."""
    params = sequence.sampling
    assert params is not None
    output = sequence.token_ids[sequence.num_prompt_tokens :]
    for token_id in range(VOCAB_SIZE):
        x = row[token_id] + dict(params.logit_bias).get(token_id, 0.0)
        if token_id in sequence.token_ids:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        count = output.count(token_id)
        x -= count * params.frequency_penalty + (count > 0) * params.presence_penalty
        if any(
            [*sequence.token_ids, token_id][-len(word) :] == [*word] for word in params.bad_words
        ):
            x = -INFINITY
        if token_id in sequence.stop_token_ids and len(output) < params.min_tokens:
            x = -INFINITY
        row[token_id] = x
    return row


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "bias": {"logit_bias": ((9, 5.0), (0, -100.0), (20, 2.5))},
    "repetition": {"repetition_penalty": 1.8},
    "reward": {"repetition_penalty": 0.5},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": -1.5},
    "bad words": {"bad_words": ((5,), (7, 7, 8), (9, 7, 6), (4, 4), (7, 9))},
    "min_tokens": {"min_tokens": 9, "stop": (1, 2)},
    "all": {
        "logit_bias": ((9, -5.0), (7, 30.0), (3, 4.0)),
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.6,
        "bad_words": ((21,), (7, 22)),
        "min_tokens": 9,
        "stop": (1,),
    },
}
WITH_PROCESSED = {"num_logprobs": 20, "logprobs_mode": "processed"}


@pytest.mark.parametrize("name", OPTIONS)
def test_processed_logprobs_match_the_formulas(name: str) -> None:
    sequence = sequence_with(**OPTIONS[name], **WITH_PROCESSED)
    logits = logits_of(1)
    expected = torch.tensor(oracle(logits[0].tolist(), sequence)).log_softmax(-1)
    (token_id,), (logprobs,) = sample_tokens(logits, sampling_of(sequence))
    assert logprobs is not None
    assert token_id == int(expected.argmax())
    values, ids = expected.sort(descending=True, stable=True)
    assert list(logprobs.top_token_ids) == ids[:20].tolist()
    assert logprobs.top_logprobs == pytest.approx(values[:20].tolist(), abs=1e-5)
    assert logprobs.logprob == logprobs.top_logprobs[0]


def test_options_apply_only_to_their_own_row() -> None:
    one_by_one = []
    logits = logits_of(len(OPTIONS), seed=4)
    for row, options in enumerate(OPTIONS.values()):
        sequence = sequence_with(**options, temperature=0.8)
        one_by_one += sample_tokens(logits[row : row + 1].clone(), sampling_of(sequence))[0]
    sequences = [sequence_with(**each, temperature=0.8) for each in OPTIONS.values()]
    inputs = sampling_of(*sequences)
    together = logits.clone()
    assert sample_tokens(together, inputs) == (one_by_one, [])
    assert torch.equal(together[0], logits[0])
    assert inputs.penalties is not None and 0 not in inputs.penalties.rows


def test_bias_of_100_determines_the_token() -> None:
    for temperature in (0.0, 1.0):
        sequence = sequence_with(logit_bias=((33, 100.0),), temperature=temperature)
        assert sample_tokens(logits_of(1), sampling_of(sequence))[0] == [33]


@pytest.mark.parametrize(
    ("word", "is_banned"),
    [
        ((8,), True),
        ((7, 8), True),
        ((9, 9, 7, 7, 7, 8), True),
        ((*PROMPT, *OUTPUT, 8), True),
        ((9, 7, 8), False),
        ((9, 8), False),
        ((1, *PROMPT, *OUTPUT, 8), False),
    ],
)
def test_bad_word_is_never_completed(word: tuple[int, ...], is_banned: bool) -> None:
    """Also if the bad word starts in the prompt."""
    sequence = sequence_with(bad_words=(word,), logit_bias=((8, 1000.0),))
    (token_id,), _ = sample_tokens(logits_of(1), sampling_of(sequence))
    assert (token_id != 8) is is_banned


def test_bad_word_longer_than_the_sequence_bans_nothing() -> None:
    sequence = new_sequence([4], SamplingParams(seed=0, max_tokens=9, bad_words=((4, 4, 1),)))
    assert sampling_of(sequence).banned == []


@pytest.mark.parametrize("k", [0, 1, 5, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.7])
def test_raw_logprobs_ignore_the_options(temperature: float, k: int) -> None:
    sequence = sequence_with(**OPTIONS["all"], temperature=temperature, num_logprobs=k)
    logits = logits_of(1, seed=2)
    expected = logits[0].log_softmax(-1)
    (token_id,), (logprobs,) = sample_tokens(logits, sampling_of(sequence))
    assert logprobs is not None
    assert token_id != int(expected.argmax()), "the options should have changed the token"
    assert logprobs.logprob == pytest.approx(float(expected[token_id]), abs=1e-6)
    assert list(logprobs.top_token_ids) == expected.argsort(descending=True)[:k].tolist()
    assert logprobs.top_logprobs == pytest.approx(
        expected.sort(descending=True).values[:k].tolist()
    )


def test_processed_logprobs_include_temperature_and_top_k() -> None:
    options = {"temperature": 2.0, "top_k": 3, **WITH_PROCESSED}
    logits = logits_of(1, seed=3)
    top_3 = logits[0].topk(3)
    expected = (top_3.values / 2.0).log_softmax(-1).tolist()
    (token_id,), (logprobs,) = sample_tokens(logits, sampling_of(sequence_with(**options)))
    assert logprobs is not None
    assert logprobs.top_token_ids[:3] == tuple(top_3.indices.tolist())
    assert logprobs.top_logprobs[:3] == pytest.approx(expected, abs=1e-6)
    assert logprobs.top_logprobs[3:] == (-INFINITY,) * 17
    # ties are in the order of their ids
    others = [each for each in range(VOCAB_SIZE) if each not in logprobs.top_token_ids[:3]]
    assert list(logprobs.top_token_ids[3:]) == others[:17]
    assert logprobs.logprob == logprobs.top_logprobs[logprobs.top_token_ids.index(token_id)]


def test_greedy_processed_logprobs_ignore_truncation() -> None:
    """Their temperature is 1, also beside a sampled row with another temperature."""
    logits = logits_of(2, seed=5)
    expected = logits[0].log_softmax(-1).sort(descending=True).values[:20].tolist()
    greedy = sequence_with(top_k=2, top_p=0.1, min_p=0.9, **WITH_PROCESSED)
    _, logprobs = sample_tokens(logits, sampling_of(greedy, sequence_with(temperature=3.0)))
    assert logprobs[1] is None
    assert logprobs[0] is not None
    assert logprobs[0].top_logprobs == pytest.approx(expected, abs=1e-5)


def test_only_rows_that_request_logprobs_get_them() -> None:
    row_options: list[dict[str, Any]] = [
        {},
        {"num_logprobs": 2},
        {"num_logprobs": 0, "logprobs_mode": "processed"},
        {"num_prompt_logprobs": 3},
    ]
    sequences = [sequence_with(**each, temperature=1.0) for each in row_options]
    logits = logits_of(4)
    expected = logits.log_softmax(-1)
    token_ids, logprobs = sample_tokens(logits, sampling_of(*sequences))
    sizes = [None if each is None else len(each.top_token_ids) for each in logprobs]
    assert sizes == [None, 2, 0, None]
    for row in (1, 2):  # at temperature 1 and without options both modes are the same
        each = logprobs[row]
        assert each is not None
        assert each.logprob == pytest.approx(float(expected[row, token_ids[row]]), abs=1e-5)


def test_sampling_with_every_token_banned_gives_no_nan() -> None:
    bad_words = tuple((token_id,) for token_id in range(VOCAB_SIZE))
    for temperature in (0.0, 1.0):
        sequence = sequence_with(bad_words=bad_words, temperature=temperature, **WITH_PROCESSED)
        (token_id,), (logprobs,) = sample_tokens(logits_of(1), sampling_of(sequence))
        assert 0 <= token_id < VOCAB_SIZE
        assert logprobs is not None
        assert logprobs.logprob == -INFINITY
        assert not any(math.isnan(each) for each in logprobs.top_logprobs)


def test_explicit_zero_is_no_penalty() -> None:
    sequence = sequence_with(frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0)
    inputs = sampling_of(sequence)
    assert (inputs.bias, inputs.penalties, inputs.banned) == (None, None, [])
    assert not inputs.raw_logprobs and not inputs.processed_logprobs


def test_penalties_of_a_long_sequence_are_sparse() -> None:
    params = SamplingParams(seed=0, max_tokens=999, temperature=0.0, frequency_penalty=0.5)
    sequence = new_sequence([5] * 500, params, output_ids=[6, 7] * 50)
    sequence.block_tables = [array("q", range(200))]
    sequence.num_computed_tokens = sequence.num_tokens - 1
    penalties = inputs_of([row_of(sequence, 1)]).sampling.penalties
    assert penalties is not None
    assert penalties.token_ids.tolist() == [5, 6, 7]
    assert penalties.subtracted.tolist() == [0.0, 25.0, 25.0]
    assert penalties.rows.dtype == penalties.token_ids.dtype == np.int64
    assert penalties.repetition.dtype == penalties.subtracted.dtype == np.float32
