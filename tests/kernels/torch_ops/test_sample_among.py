"""The few tokens of each row, against all tokens with a mask: equal bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kernels.torch_ops.sample import sample, uniform
from kernels.torch_ops.sample_among import _uniform, sample_among

NUM_ROWS, VOCAB_SIZE = 12, 3001


class Rows:
    """Logits and columns of several rows, and the tokens that each may sample."""

    def __init__(self, seed: int, *, most_tokens: int = 700) -> None:
        self.randomness = np.random.default_rng(seed)
        self.logits = self.randomness.normal(0, 4, (NUM_ROWS, VOCAB_SIZE)).astype(np.float32)
        self.logits[0] = 1.0  # ties
        self.allowed = [
            self._tokens(int(most_tokens ** self.randomness.random())) for _ in range(NUM_ROWS)
        ]
        self.columns = {
            "temperature": self.randomness.choice([0, 0.01, 0.7, 1, 5], NUM_ROWS).astype(
                np.float32
            ),
            "min_p": self.randomness.choice([0, 0, 0.1, 1], NUM_ROWS).astype(np.float32),
            "seed": self.randomness.integers(0, 2**64, NUM_ROWS, np.uint64),
            "choice_index": self.randomness.integers(0, 9, NUM_ROWS),
            "output_position": self.randomness.integers(0, 1 << 20, NUM_ROWS),
        }

    def _tokens(self, count: int) -> NDArray[np.int64]:
        return np.sort(self.randomness.choice(VOCAB_SIZE, count, replace=False))

    def among_few(self) -> list[int]:
        counts = [len(each) for each in self.allowed]
        rows, token_ids = np.repeat(np.arange(NUM_ROWS), counts), np.concatenate(self.allowed)
        return sample_among(
            self.logits[rows, token_ids], token_ids, np.cumsum(counts) - counts, **self.columns
        ).tolist()

    def among_all(self) -> list[int]:
        logits = torch.full((NUM_ROWS, VOCAB_SIZE), -math.inf)
        for row, token_ids in enumerate(self.allowed):
            logits[row, token_ids] = torch.from_numpy(self.logits[row, token_ids])
        columns = {**self.columns, "seed": self.columns["seed"].view(np.int64)}
        off = {"top_k": torch.zeros(NUM_ROWS, dtype=torch.int64), "top_p": torch.ones(NUM_ROWS)}
        return sample(
            logits, **off, **{k: torch.from_numpy(v) for k, v in columns.items()}
        ).tolist()


@pytest.mark.parametrize("seed", range(60))
def test_tokens_are_those_of_sample(seed: int) -> None:
    rows = Rows(seed)
    assert rows.among_few() == rows.among_all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_equal_temperature(temperature: float) -> None:
    rows = Rows(7)
    rows.columns["temperature"][:] = temperature
    rows.columns["min_p"][:] = 0
    assert rows.among_few() == rows.among_all()


def test_noise_is_that_of_all_tokens() -> None:
    rows = Rows(3)
    columns = [rows.columns[name] for name in ("seed", "choice_index", "output_position")]
    tensors = [torch.from_numpy(each.astype(np.int64)) for each in columns]
    full = uniform(*tensors, VOCAB_SIZE).numpy()
    token_ids = np.tile(np.arange(VOCAB_SIZE), NUM_ROWS)
    found = _uniform(np.repeat(np.arange(NUM_ROWS), VOCAB_SIZE), token_ids, *columns)
    assert np.array_equal(found.reshape(full.shape).view(np.int32), full.view(np.int32))


def test_broken_logits_give_an_allowed_token() -> None:
    for broken in (math.nan, -math.inf):
        rows = Rows(5)
        rows.logits[:] = broken
        for token_id, allowed in zip(rows.among_few(), rows.allowed, strict=True):
            assert token_id in allowed
