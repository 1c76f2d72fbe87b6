"""What heartbeats report of a gateway's requests, in bounded form."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.observability.metrics.histograms import Histogram
from shared.messages import LATENCY_BOUNDS_S

MAX_MOVED_FROM = 16


class MovedStreams:
    """Resubmissions by the worker that had the request, for the MAX_MOVED_FROM last workers."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}  # the last counted worker is last

    @property
    def counts(self) -> tuple[tuple[str, int], ...]:
        return tuple(self._counts.items())

    def count(self, worker_id: str) -> None:
        self._counts[worker_id] = self._counts.pop(worker_id, 0) + 1
        if len(self._counts) > MAX_MOVED_FROM:
            del self._counts[next(iter(self._counts))]


def latency_counts(histograms: Sequence[Histogram]) -> tuple[int, ...]:
    """Returns the sums of histograms by bucket of LATENCY_BOUNDS_S and above, without empty buckets
    at the end.
    """
    sums = Histogram.sum_of(histograms).counts(LATENCY_BOUNDS_S) if histograms else []
    while sums and not sums[-1]:
        sums.pop()
    return tuple(sums)
