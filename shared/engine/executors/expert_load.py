"""Measures how evenly a model's experts are used, from counts that are read once in a while.

Counts are halved every HALF_LIFE_S, so that the load is that of the last minutes. The imbalance of
a layer is the load of its busiest expert over the mean: 1 is even; with E experts, E is the most.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

HALF_LIFE_S = 60.0
LEAST_MEAN = 16.0  # tokens an expert; of fewer, chance alone makes some experts busy


class ExpertLoad:
    """Counts tokens by expert. `counts` [layers, experts]: tokens of the last minutes, older ones
    with less weight.
    """

    def __init__(self) -> None:
        self.counts: NDArray[np.float64] | None = None
        self._last: tuple[NDArray[np.int64], float] | None = None

    def observe(self, totals: NDArray[np.int64], now: float) -> None:
        """totals [layers, experts] since the process started. The first ones are only a start:
        they have the steps that warm a model up.
        """
        if self._last is not None and self.counts is not None:
            before, then = self._last
            self.counts *= 0.5 ** ((now - then) / HALF_LIFE_S)
            self.counts += totals - before
        else:
            self.counts = np.zeros(totals.shape)
        self._last = totals, now

    @property
    def imbalance(self) -> float:
        """The imbalance of the worst layer, or 0 as long as too few tokens are counted."""
        if self.counts is None:
            return 0.0
        means = self.counts.mean(axis=1)
        known = means >= LEAST_MEAN
        if not known.any():
            return 0.0
        return float((self.counts.max(axis=1)[known] / means[known]).max())
