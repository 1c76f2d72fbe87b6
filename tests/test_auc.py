from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.auc import Auc, auc

VALUES = st.lists(st.integers(0, 9).map(float), min_size=2, max_size=12)


def naive(smaller: list[float], larger: list[float]) -> tuple[float, float]:
    """DeLong's estimate and its variance, computed pair by pair."""

    def wins(x: float, y: float) -> float:
        return 1.0 if x < y else 0.5 if x == y else 0.0

    def variance(shares: list[float]) -> float:
        mean = sum(shares) / len(shares)
        return sum((each - mean) ** 2 for each in shares) / (len(shares) - 1)

    of_smaller = [sum(wins(x, y) for y in larger) / len(larger) for x in smaller]
    of_larger = [sum(wins(x, y) for x in smaller) / len(smaller) for y in larger]
    value = sum(of_smaller) / len(smaller)
    return value, variance(of_smaller) / len(smaller) + variance(of_larger) / len(larger)


@given(VALUES, VALUES)
def test_auc_equals_pairwise_delong(smaller: list[float], larger: list[float]) -> None:
    result = auc(smaller, larger)
    value, variance = naive(smaller, larger)
    margin = 1.959964 * variance**0.5
    assert result.value == pytest.approx(value)
    assert result.low == pytest.approx(max(0, value - margin), abs=1e-9)
    assert result.high == pytest.approx(min(1, value + margin), abs=1e-9)


def test_separable_classes_have_extreme_auc() -> None:
    assert auc([1.0, 2.0, 3.0], [4.0, 5.0]) == (1.0, 1.0, 1.0)
    assert auc([4.0, 5.0], [1.0, 2.0, 3.0]).largest_advantage == 0.5


def test_advantage_uses_the_bound_farther_from_half() -> None:
    assert Auc(0.51, 0.49, 0.53).largest_advantage == pytest.approx(0.03)
    assert Auc(0.48, 0.44, 0.52).largest_advantage == pytest.approx(0.06)


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 1000))
def test_equal_distributions_have_small_advantage(seed: int) -> None:
    rng = random.Random(seed)
    bounds = []
    for _ in itertools.repeat(None, 20):
        classes = [[rng.lognormvariate(0, 1) for _ in range(2000)] for _ in range(2)]
        bounds.append(auc(*classes).largest_advantage)
    assert sum(bound <= 0.05 for bound in bounds) >= 18


def test_class_with_one_value_is_rejected() -> None:
    with pytest.raises(ValueError, match="two of each class"):
        auc([1.0], [1.0, 2.0])
