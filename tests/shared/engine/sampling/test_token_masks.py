"""Token masks in the sampler: what they exclude, and what happens if they come late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.engine.batching.sequence import Sequence
from shared.engine.sampling.mask_words import (
    MAX_FEW,
    NO_MASKS,
    JoinedMasks,
    few_tokens,
    join_masks,
)
from shared.engine.sampling.sampler import sample_tokens
from shared.engine.step import SamplingInputs, TokenMasks
from tests.shared.engine.sampling.test_sampler import logits_of, sampling_of, sequence_with
from tests.support.engine.masked import LateMask, ReadyMask, SumGrammar, words_of

VOCAB_SIZE = 50
LARGEST = float(np.finfo(np.float32).max)


def masked(allowed: list[int], row: int = 0) -> JoinedMasks:
    return JoinedMasks({row: words_of(allowed, VOCAB_SIZE)}, frozenset())


def token_of(sequence: Sequence, allowed: list[int], logits: Tensor | None = None) -> int:
    logits = logits_of(1) if logits is None else logits
    (token_id,), _ = sample_tokens(logits, sampling_of(sequence), masked(allowed))
    return token_id


def excluding_all_but(allowed: list[int], logits: Tensor) -> Tensor:
    excluded = torch.full_like(logits, float("-inf"))
    excluded[:, allowed] = logits[:, allowed]
    return excluded


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0}, {"temperature": 5.0, "top_k": 3, "top_p": 0.7}]
)
def test_a_token_is_sampled_as_if_the_others_had_no_weight(options: dict[str, Any]) -> None:
    allowed = [0, 2, 31, 32, 33, 40, 49]
    tokens = set()
    for seed in range(20):
        sequence = sequence_with(seed=seed, **options)
        (expected,), _ = sample_tokens(
            excluding_all_but(allowed, logits_of(1, seed=seed)), sampling_of(sequence)
        )
        token_id = token_of(sequence, allowed, logits_of(1, seed=seed))
        assert token_id == expected
        tokens.add(token_id)
    assert len(tokens) > 3


@pytest.mark.parametrize("vocab_size", [50, 64, 200_003])
def test_few_tokens_are_those_of_the_masks(vocab_size: int) -> None:
    """A row that may sample many tokens is left out, as is one with bits beyond the vocabulary."""
    many = list(range(min(vocab_size, MAX_FEW + 1)))
    allowed = {
        5: [0, 31, 32, vocab_size - 1],
        1: [vocab_size - 1],
        2: many,
        0: [7],
    }
    words = {row: words_of(each, vocab_size) for row, each in allowed.items()}
    words[3] = np.full_like(words[0], -1)
    found = few_tokens(words, vocab_size)
    assert found is not None
    ends = [*found.starts.tolist(), len(found.token_ids)][1:]
    of_row = {
        row: found.token_ids[start:end].tolist()
        for row, start, end in zip(found.rows, found.starts, ends, strict=True)
    }
    if len(many) > MAX_FEW:
        del allowed[2]
    if vocab_size % 32 == 0:
        allowed[3] = list(range(vocab_size))
    assert of_row == allowed
    assert found.row_of_token.tolist() == [row for row in of_row for _ in of_row[row]]
    assert few_tokens({2: np.full(MAX_FEW, -1, np.int32)}, 32 * MAX_FEW) is None


def test_rows_with_few_tokens_beside_others() -> None:
    """One free, one cut by top-k, one scored: each as alone."""
    sequences = [
        sequence_with(temperature=1.0, seed=seed, **options)
        for seed, options in enumerate(
            (
                {},
                {"top_k": 2},
                {},
                {"num_logprobs": 1, "logprobs_mode": "processed"},
                {"min_p": 0.5},
            )
        )
    ]
    allowed = [3, 8, 30, 45, 49]
    logits = logits_of(5)
    alone = [
        sample_tokens(
            row.unsqueeze(0).clone(), sampling_of(each), masked(allowed) if i else NO_MASKS
        )
        for i, (row, each) in enumerate(zip(logits, sequences, strict=True))
    ]
    words = {row: words_of(allowed, VOCAB_SIZE) for row in range(1, 5)}
    token_ids, logprobs = sample_tokens(
        logits, sampling_of(*sequences), JoinedMasks(words, frozenset())
    )
    assert token_ids == [each[0][0] for each in alone]
    assert logprobs[3] == alone[3][1][0]


def test_bans_apply_within_the_mask() -> None:
    sequence = sequence_with(bad_words=((5,), (7, 7, 6)), min_tokens=9, stop=(1, 40))
    assert token_of(sequence, [1, 5, 6, 12, 40]) == 12


@pytest.mark.parametrize(
    "options",
    [
        {"bad_words": ((5,),)},
        {"min_tokens": 9, "stop": (5,)},
        {"logit_bias": ((5, -100.0),)},
        {"logit_bias": ((5, -LARGEST), (5, -LARGEST))},
        {"logit_bias": ((5, -100.0),), "bad_words": ((5,),), "temperature": 0.01},
    ],
)
def test_the_mask_alone_decides_if_bans_leave_nothing(options: dict[str, Any]) -> None:
    assert token_of(sequence_with(**options), [5]) == 5


def test_rows_have_masks_and_bans_of_their_own() -> None:
    """The bans of a row without a mask apply, beside a masked row."""
    sequences = [sequence_with(), sequence_with(), sequence_with(bad_words=((9,), (3,)))]
    logits = torch.arange(VOCAB_SIZE, 0, -1.0).repeat(3, 1)
    logits[2, [3, 9]] = 99.0
    token_ids, _ = sample_tokens(logits, sampling_of(*sequences), masked([7, 8], row=1))
    assert token_ids == [0, 7, 0]


def test_processed_logprobs_are_of_the_masked_distribution_and_raw_ones_of_the_model() -> None:
    allowed = [3, 30, 45]
    by_mode = {}
    for mode in ("raw", "processed"):
        sequence = sequence_with(num_logprobs=5, logprobs_mode=mode)
        (token_id,), (logprobs,) = sample_tokens(
            logits_of(1), sampling_of(sequence), masked(allowed)
        )
        assert logprobs is not None
        by_mode[mode] = logprobs
    model = logits_of(1).log_softmax(-1)[0]
    assert by_mode["raw"].logprob == pytest.approx(model[token_id].item())
    assert by_mode["raw"].top_token_ids == tuple(model.topk(5).indices.tolist())
    chances = logits_of(1)[0, allowed].softmax(-1)
    assert by_mode["processed"].logprob == pytest.approx(chances.max().log().item(), abs=1e-6)
    assert set(by_mode["processed"].top_token_ids[:3]) == set(allowed)
    assert by_mode["processed"].top_logprobs[3] == float("-inf")


def test_inputs_name_the_rows_with_masks() -> None:
    sequences = [sequence_with(), sequence_with(), sequence_with()]
    sequences[1].grammar = SumGrammar(VOCAB_SIZE)
    inputs = sampling_of(*sequences)
    assert inputs.masks is not None
    assert inputs.masks.rows.tolist() == [1]
    words = inputs.masks.masks[0].wait(0.0)
    assert words is not None and words.tolist() == words_of(range(1, 50, 5), 50).tolist()
    assert not inputs.is_plain_greedy
    assert sampling_of(sequence_with()).masks is None


class Unstarted(SumGrammar):
    def mask(self) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize("bans_stop", [True, False])
def test_a_grammar_that_has_not_started_may_ban_the_end(bans_stop: bool) -> None:
    sequence = sequence_with(stop=(4, 6))
    sequence.grammar = Unstarted(VOCAB_SIZE)
    sequence.grammar.bans_stop = bans_stop
    inputs = sampling_of(sequence)
    assert inputs.masks is None
    assert sorted(inputs.banned) == ([(0, 4), (0, 6)] if bans_stop else [])


class SteppedClock:
    """Advances by what is waited for."""

    def __init__(self) -> None:
        self.time_s = 10.0

    def now(self) -> float:
        return self.time_s

    async def sleep(self, delay_s: float) -> None:
        raise AssertionError("nobody sleeps")


class WaitedMask(LateMask):
    """Is late by some seconds of the clock."""

    def __init__(self, clock: SteppedClock, late_by_s: float) -> None:
        super().__init__()
        self._clock = clock
        self._ready_at_s = clock.now() + late_by_s

    def wait(self, timeout_s: float) -> Any:
        super().wait(timeout_s)
        until = min(self._ready_at_s, self._clock.now() + timeout_s)
        self._clock.time_s = max(self._clock.now(), until)
        is_ready = self._clock.now() >= self._ready_at_s
        return words_of([1], VOCAB_SIZE) if is_ready else None


def masks_of(*masks: Any) -> TokenMasks:
    return TokenMasks(np.arange(len(masks)) * 2, masks)


@pytest.mark.parametrize(("forward_time_s", "wait_s"), [(0.0, 0.001), (0.005, 0.001), (0.1, 0.01)])
def test_all_masks_have_one_deadline(forward_time_s: float, wait_s: float) -> None:
    clock = SteppedClock()
    lateness = (0.6 * wait_s, 0.9 * wait_s, 1.1 * wait_s, 9.0)
    masks = [WaitedMask(clock, each) for each in lateness]
    joined = join_masks(masks_of(*masks), clock, lambda: forward_time_s)
    assert set(joined.words) == {0, 2}
    assert joined.late_rows == {4, 6}
    assert clock.now() == pytest.approx(10.0 + wait_s)


def test_masks_that_are_ready_take_no_time() -> None:
    def forward_time_s() -> float:
        raise AssertionError("the device is waited for")

    ready = ReadyMask([3], VOCAB_SIZE)
    joined = join_masks(masks_of(ready, ready), SteppedClock(), forward_time_s)
    assert set(joined.words) == {0, 2}
    assert join_masks(None, SteppedClock(), forward_time_s) is NO_MASKS


def test_a_late_row_changes_no_other() -> None:
    sequences = [sequence_with(temperature=0.9, seed=seed) for seed in range(3)]
    inputs: SamplingInputs = sampling_of(*sequences)
    words = {row: words_of(range(row, 50, 7), VOCAB_SIZE) for row in range(3)}
    in_time, _ = sample_tokens(logits_of(3), inputs, JoinedMasks(words, frozenset()))
    del words[1]
    late, _ = sample_tokens(logits_of(3), inputs, JoinedMasks(words, frozenset({1})))
    assert [late[0], late[2]] == [in_time[0], in_time[2]]
