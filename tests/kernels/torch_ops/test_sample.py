from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.torch_ops.sample import _floors, sample, uniform

MASK = 0xFFFFFFFF


def _sample(logits: Tensor, **overrides: Any) -> Tensor:
    """Samples one token per row; positions count up unless given."""
    num_rows = logits.shape[0]
    columns: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 1234,
        "choice_index": 0,
        "output_position": torch.arange(num_rows),
        **overrides,
    }
    floats = ("temperature", "top_p", "min_p")
    tensors = {
        name: value
        if isinstance(value, Tensor)
        else torch.full((num_rows,), value, dtype=torch.float32 if name in floats else torch.int64)
        for name, value in columns.items()
    }
    return sample(logits.clone(), **tensors)


def _chi_square(sampled: Tensor, probabilities: Tensor) -> float:
    expected = probabilities.double() * len(sampled)
    counts = torch.bincount(sampled, minlength=len(probabilities)).double()
    return float(((counts - expected).pow(2) / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("varied", ["output_position", "seed", "choice_index"])
def test_samples_follow_the_softmax(temperature: float, varied: str) -> None:
    """Chi-square with 19 degrees of freedom: exceeds 43.8 once in a thousand."""
    logits = torch.randn(20, generator=torch.Generator().manual_seed(0))
    num_samples = 20_000
    counter = torch.arange(num_samples)
    options = {"output_position": 3, varied: counter * 7919 if varied == "seed" else counter}
    sampled = _sample(logits.expand(num_samples, -1), temperature=temperature, **options)
    assert _chi_square(sampled, (logits / temperature).softmax(-1)) < 43.8


def test_noise_is_the_same_in_every_row_and_batch() -> None:
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(1))
    seeds = torch.arange(64) * 0x1234567 - 2**62
    together = _sample(logits, seed=seeds, temperature=5.0)
    flipped = _sample(
        logits.flip(0),
        seed=seeds.flip(0),
        output_position=torch.arange(64).flip(0),
        temperature=5.0,
    )
    assert torch.equal(together, flipped.flip(0))
    for row in range(64):
        alone = _sample(
            logits[row : row + 1],
            seed=seeds[row : row + 1],
            output_position=torch.tensor([row]),
            temperature=5.0,
        )
        assert alone[0] == together[row]


def test_every_key_changes_the_noise() -> None:
    base = {"seed": 5, "choice_index": 0, "output_position": 0}
    keys = [base, *({**base, name: base[name] + 1} for name in base), {**base, "seed": 5 + 2**32}]
    columns = {name: torch.tensor([key[name] for key in keys]) for name in base}
    noise = uniform(**columns, vocab_size=4000)
    assert noise.min() > 0
    assert noise.max() < 1
    correlation = torch.corrcoef(noise)
    assert (correlation - torch.eye(len(keys))).abs().max() < 0.08


def test_noise_is_pinned() -> None:
    """Other workers, versions and kernels must sample the same: these numbers must not change."""
    noise = uniform(torch.tensor([42]), torch.tensor([1]), torch.tensor([7]), 4)
    assert (noise[0] * 2**24).long().tolist() == [15510593, 3128491, 15273945, 2344853]


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    assert _sample(logits, temperature=0.0).tolist() == [1, 0]


def test_lowest_temperature_samples_the_largest_logit() -> None:
    logits = torch.tensor([[1.0, 2.0, 40.0, 39.0]])
    for temperature in (1e-3, 1e-37, 1e-40):
        assert _sample(logits, temperature=temperature, top_k=3, top_p=0.9).tolist() == [2]
        assert _sample(logits, temperature=temperature).tolist() == [2]


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    temperature = torch.tensor([0.0, 1.0, 0.0, 9.0, 9.0, 0.0])
    mixed = _sample(logits, temperature=temperature)
    assert torch.equal(mixed[temperature == 0], logits.argmax(-1)[temperature == 0])
    assert torch.equal(mixed[3:5], _sample(logits, temperature=9.0)[3:5])


PROBABILITIES = torch.tensor([0.05, 0.4, 0.02, 0.3, 0.15, 0.08])


@pytest.mark.parametrize(
    ("options", "support"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 100}, {0, 1, 2, 3, 4, 5}),
        ({"top_p": 0.0}, {1}),
        ({"top_p": 0.6}, {1, 3}),
        ({"top_p": 0.75}, {1, 3, 4}),
        ({"min_p": 0.3}, {1, 3, 4}),
        ({"min_p": 1.0}, {1}),
        # top-p counts within top-k: 0.4 / 0.7 < 0.6
        ({"top_k": 2, "top_p": 0.6}, {1, 3}),
        ({"top_k": 2, "top_p": 0.5}, {1}),
        ({"top_p": 0.9, "min_p": 0.5}, {1, 3}),
        # the temperature is applied first: probabilities' square roots are flatter
        ({"temperature": 2.0, "min_p": 0.5}, {1, 3, 4}),
    ],
)
def test_truncation_samples_exactly_its_support(
    options: dict[str, float], support: set[int]
) -> None:
    sampled = _sample(PROBABILITIES.log().expand(4000, -1), **options)
    assert set(sampled.tolist()) == support


def test_truncated_samples_follow_the_renormalised_softmax() -> None:
    sampled = _sample(PROBABILITIES.log().expand(20_000, -1), top_k=3)
    retained = torch.tensor([1, 3, 4])
    ranks = torch.bucketize(sampled, retained)
    expected = PROBABILITIES[retained] / PROBABILITIES[retained].sum()
    assert _chi_square(ranks, expected) < 13.8  # 2 degrees of freedom, one in a thousand


def test_each_row_has_its_own_truncation() -> None:
    logits = PROBABILITIES.log().expand(5, -1)
    top_k, top_p = torch.tensor([0, 1, 0, 2, 0]), torch.tensor([1.0, 1.0, 0.1, 1.0, 1.0])
    together = _sample(logits, top_k=top_k, top_p=top_p)
    for row in range(5):
        alone = _sample(
            logits[:1],
            top_k=top_k[row : row + 1],
            top_p=top_p[row : row + 1],
            output_position=torch.tensor([row]),
        )
        assert alone[0] == together[row]


def test_banned_token_is_never_sampled() -> None:
    logits = PROBABILITIES.log().clone()
    logits[1] = float("-inf")
    assert 1 not in _sample(logits.expand(2000, -1), top_p=0.99).tolist()


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0])
def test_limit_is_equal_for_partial_and_full_sort(spread: float) -> None:
    """With ties throughout, and limits on both sides of the sorted part."""
    logits = torch.randn(60, 40, generator=torch.Generator().manual_seed(3)).mul_(spread)
    scaled = logits.mul_(4).round_().div_(4).sub_(logits.amax(-1, keepdim=True))
    top_k = torch.tensor([0, 1, 7, 8, 9, 39, 40, 41]).repeat(8)[:60]
    top_p = torch.tensor([1.0, 0.0, 0.3, 0.9, 0.999]).repeat(12)
    few, every = (_floors(scaled, top_k, top_p, count) for count in (8, 40))
    assert torch.equal(few, every)
    for row in range(60):
        assert few[row] == _floor_of(scaled[row].tolist(), int(top_k[row]), float(top_p[row]))


def _floor_of(scaled: list[float], top_k: int, top_p: float) -> float:
    ordered = sorted(scaled, reverse=True)
    if 0 < top_k < len(ordered):
        ordered = [x for x in ordered if x >= ordered[top_k - 1]]
    elif top_p == 1:
        return float("-inf")
    if top_p == 1:
        return ordered[-1]
    weights = [math.exp(x) for x in ordered]
    retained = [x for i, x in enumerate(ordered) if sum(weights[:i]) < top_p * sum(weights)]
    return retained[-1] if retained else ordered[0]


def test_noise_equals_its_formula() -> None:
    seeds = [0, 1, 2**31, 2**32 - 1, 2**63 + 12345, 2**64 - 1]
    columns = [
        torch.tensor(np.array(column, dtype=np.uint64).view(np.int64))
        for column in (seeds, [0, 1, 2, 2**31, 2**32, 2**63 - 1], [5, 0, 2**20, 3, 2**31 - 1, 7])
    ]
    sampled = uniform(*columns, vocab_size=50)
    for row, key in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
        assert sampled[row].tolist() == [_uniform_of(*key, token) for token in range(50)]


def _uniform_of(seed: int, choice_index: int, output_position: int, token: int) -> float:
    row = 0
    for word in (seed, seed >> 32, choice_index, output_position):
        row = _mix_of((row ^ word & MASK) * 5 + 0xE6546B64 & MASK)
    bits = _mix_of(_mix_of(row ^ token * 0x9E3779B1 & MASK) ^ _mix_of(row + 0x9E3779B1 & MASK))
    return (bits >> 9) * 2.0**-23 + 2.0**-24


def _mix_of(h: int) -> int:
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16
