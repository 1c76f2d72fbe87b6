"""Separation of two classes by one number: the area under the ROC curve, and its uncertainty.

AUC is the probability that a sample of the first class is smaller than one of the second; ties
count half. Its variance is DeLong's (Biometrics 44, 1988), computed from ranks as in Sun and Xu
(IEEE Signal Processing Letters 21, 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Z_95 = 1.959964


class Auc(NamedTuple):
    value: float
    low: float  # lower bound of the 95 % interval
    high: float

    @property
    def largest_advantage(self) -> float:
        """The upper 95 % bound of |AUC - 0.5|: the largest advantage of a guess."""
        return max(self.high - 0.5, 0.5 - self.low)


def auc(smaller: Sequence[float], larger: Sequence[float]) -> Auc:
    """Returns the AUC of `smaller` being smaller. Raises ValueError for a class with
    fewer than two.
    """
    m, n = len(smaller), len(larger)
    if min(m, n) < 2:
        raise ValueError(f"{m} and {n} values: an interval needs two of each class")
    both = np.concatenate([larger, smaller])
    ranks = _mid_ranks(both)
    # for each value, the share of the other class that is on the right side of it
    of_larger = (ranks[:n] - _mid_ranks(both[:n])) / m
    of_smaller = 1 - (ranks[n:] - _mid_ranks(both[n:])) / n
    value = float(of_larger.mean())
    variance = of_smaller.var(ddof=1) / m + of_larger.var(ddof=1) / n
    margin = Z_95 * float(np.sqrt(variance))
    return Auc(value, max(0.0, value - margin), min(1.0, value + margin))


def _mid_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 1; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    middles: NDArray[np.float64] = (last - counts + last + 1) / 2
    return middles[inverse]
