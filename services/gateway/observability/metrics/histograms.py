"""Histograms by model that are counted once and exported under two names with their own buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Self

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

Buckets = tuple[float, ...]
# The buckets of vLLM, for panels and alerts that were written for them.
VLLM_TTFT: Buckets = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
VLLM_ITL: Buckets = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
VLLM_REQUEST: Buckets = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
VLLM_TOKENS: Buckets = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
SHORT: Buckets = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
MIDDLE: Buckets = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
LONG: Buckets = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
BYTES: Buckets = tuple(float(4**power) for power in range(6, 18))  # 4 KiB to 16 GiB


@dataclass(frozen=True, slots=True)
class HistogramSpec:
    """A histogram's names and buckets. `buckets` are those of `name`, and empty if the histogram is
    exported under `vllm_name` alone. `fine_buckets` are for heartbeats.
    """

    name: str
    text: str
    buckets: Buckets = ()
    vllm_name: str = ""
    vllm_buckets: Buckets = ()
    fine_buckets: Buckets = ()

    @property
    def bounds(self) -> Buckets:
        return tuple(sorted({*self.buckets, *self.vllm_buckets, *self.fine_buckets, inf}))


class Histogram:
    """Counts values by bucket, from one thread and so without the two locks a value of
    prometheus_client.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Buckets) -> None:
        self._bounds = bounds
        self._counts = [0] * len(bounds)
        self._sum = 0.0

    @classmethod
    def sum_of(cls, histograms: Sequence[Histogram]) -> Self:
        """Returns the sum of histograms of one spec, of which there is at least one."""
        total = cls(histograms[0]._bounds)
        total._counts = [sum(each) for each in zip(*(it._counts for it in histograms), strict=True)]
        total._sum = sum(each._sum for each in histograms)
        return total

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def shown(self, buckets: Buckets) -> tuple[list[tuple[str, float]], float]:
        """Returns the cumulative counts of the buckets, which must be among the bounds, and the sum
        of values.
        """
        totals = dict(zip(self._bounds, accumulate(tuple(self._counts)), strict=True))
        return [(floatToGoString(each), totals[each]) for each in (*buckets, inf)], self._sum

    def counts(self, buckets: Buckets) -> list[int]:
        """Returns the number of values in each of the buckets, which must be among the bounds, and
        above the last one.
        """
        totals = dict(zip(self._bounds, accumulate(self._counts), strict=True))
        upper = [totals[each] for each in (*buckets, inf)]
        return [after - before for before, after in zip((0, *upper), upper, strict=False)]


class ModelHistograms:
    """The histograms of one model, by name."""

    def __init__(self, specs: Iterable[HistogramSpec]) -> None:
        self.by_name = {each.name: Histogram(each.bounds) for each in specs}

    def observe(self, name: str, value: float) -> None:
        self.by_name[name].observe(value)


def own_histograms(
    specs: Iterable[HistogramSpec], models: Mapping[str, ModelHistograms]
) -> Iterator[Metric]:
    for spec in specs:
        if spec.buckets:
            family = HistogramMetricFamily(f"hearth_{spec.name}", spec.text, labels=["model"])
            for model, histograms in dict(models).items():
                buckets, total = histograms.by_name[spec.name].shown(spec.buckets)
                family.add_metric([model], buckets, total)
            yield family


def vllm_histograms(
    specs: Iterable[HistogramSpec], models: Mapping[str, ModelHistograms], engine: str
) -> Iterator[Metric]:
    """Yields the histograms under vLLM's names. `engine` is the label of values that a gateway
    measures for all workers together.
    """
    for spec in specs:
        if spec.vllm_name:
            family = HistogramMetricFamily(
                f"vllm:{spec.vllm_name}", spec.text, labels=["model_name", "engine"]
            )
            for model, histograms in dict(models).items():
                buckets, total = histograms.by_name[spec.name].shown(spec.vllm_buckets)
                family.add_metric([model, engine], buckets, total)
            yield family
