"""The speeds of a cluster over the last minutes, from the counters in gateways' heartbeats. No I/O.

Each sample covers SAMPLE_S, and the ring has NUM_SAMPLES of them; the present figures cover the
last NUM_CURRENT samples. All are of the whole cluster: sums over all gateways.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf

import msgspec

from shared.messages import LATENCY_BOUNDS_S, GatewayLoad

SAMPLE_S = 5.0
NUM_SAMPLES = 180  # 15 minutes
NUM_CURRENT = 12  # one minute
_COUNTS = ("num_requests", "num_failed_requests", "num_resubmissions", "num_lost_streams")


class FleetFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of all gateways over `duration_s` until the Unix time `at`. Latencies are seconds,
    and None without a token; `failed_share` is the share of requests that ended in an error of the
    cluster, or None without a request.
    """

    at: float
    duration_s: float
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    itl_p50_s: float | None = None
    itl_p99_s: float | None = None
    requests_per_s: float = 0.0
    failed_share: float | None = None
    num_moved: int = 0
    num_lost: int = 0


@dataclass(slots=True)
class _Interval:
    """Counts of all gateways in an interval of `duration_s`."""

    duration_s: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * len(_COUNTS))
    ttft: list[int] = field(default_factory=list)
    itl: list[int] = field(default_factory=list)

    def add_difference(self, before: GatewayLoad, load: GatewayLoad) -> None:
        for index, name in enumerate(_COUNTS):
            self.counts[index] += max(0, getattr(load, name) - getattr(before, name))
        if load.itl_counts != before.itl_counts:
            self.itl = _sum((self.itl, _difference(before.itl_counts, load.itl_counts)))
        if load.ttft_counts != before.ttft_counts:
            self.ttft = _sum((self.ttft, _difference(before.ttft_counts, load.ttft_counts)))

    def figures(self, at: float) -> FleetFigures:
        num_requests, num_failed, num_moved, num_lost = self.counts
        return FleetFigures(
            at=round(at, 1),
            duration_s=round(self.duration_s, 1),
            ttft_p50_s=quantile(self.ttft, 0.5),
            ttft_p99_s=quantile(self.ttft, 0.99),
            itl_p50_s=quantile(self.itl, 0.5),
            itl_p99_s=quantile(self.itl, 0.99),
            requests_per_s=round(num_requests / max(self.duration_s, 1e-9), 2),
            failed_share=round(num_failed / num_requests, 4) if num_requests else None,
            num_moved=num_moved,
            num_lost=num_lost,
        )


class FleetHistory:
    """`now` and `wall` return seconds, `wall` those since 1970."""

    def __init__(self, now: Callable[[], float], wall: Callable[[], float]) -> None:
        self._now = now
        self._wall = wall
        self._loads: dict[str, tuple[int, GatewayLoad]] = {}  # epoch and last counters by gateway
        self._began_at = -inf
        self._interval = _Interval()
        self._recent: deque[_Interval] = deque(maxlen=NUM_CURRENT)
        self._samples: deque[FleetFigures] = deque(maxlen=NUM_SAMPLES)
        self.num_samples = 0  # since the start

    @property
    def samples(self) -> tuple[FleetFigures, ...]:
        return tuple(self._samples)

    def last(self, number: int) -> tuple[FleetFigures, ...]:
        return self.samples[-number:] if number > 0 else ()

    @property
    def current(self) -> FleetFigures | None:
        """The figures of the last minute, or None before this process's first sample."""
        if not self._recent:
            return None
        total = _Interval(
            sum(each.duration_s for each in self._recent),
            [sum(counts) for counts in zip(*(each.counts for each in self._recent), strict=True)],
            _sum(each.ttft for each in self._recent),
            _sum(each.itl for each in self._recent),
        )
        return total.figures(self._samples[-1].at)

    def observe(self, gateway_id: str, epoch: int, load: GatewayLoad) -> None:
        """Counts what has happened since the gateway's last heartbeat; a restarted gateway has
        counted from zero.
        """
        known = self._loads.get(gateway_id)
        self._loads[gateway_id] = epoch, load
        if known is not None:
            before = known[1] if known[0] == epoch else GatewayLoad()
            self._interval.add_difference(before, load)
        self._close_interval()

    def forget(self, gateway_id: str) -> None:
        self._loads.pop(gateway_id, None)

    def restore(self, samples: Iterable[FleetFigures]) -> None:
        """Puts the samples of an earlier process before this one's."""
        oldest = self._wall() - NUM_SAMPLES * SAMPLE_S
        restored = [each for each in samples if each.at >= oldest]
        self._samples = deque((*restored, *self._samples), maxlen=NUM_SAMPLES)

    def _close_interval(self) -> None:
        now = self._now()
        if self._began_at == -inf:
            self._began_at = now
        if now - self._began_at < SAMPLE_S:
            return
        closed, self._interval = self._interval, _Interval()
        closed.duration_s, self._began_at = now - self._began_at, now
        self._recent.append(closed)
        self._samples.append(closed.figures(self._wall()))
        self.num_samples += 1


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Returns the value below which `share` of the values are, in seconds, from their numbers by
    bucket of LATENCY_BOUNDS_S; None without values. Values are taken as spread evenly in a bucket.
    """
    rest, index = share * sum(counts), 0
    if not rest:
        return None
    while counts[index] < rest:
        rest -= counts[index]
        index += 1
    lower = LATENCY_BOUNDS_S[index - 1] if index else 0.0
    upper = LATENCY_BOUNDS_S[min(index, len(LATENCY_BOUNDS_S) - 1)]
    return round(lower + (upper - lower) * rest / counts[index], 6)


def _sum(by_bucket: Iterable[Sequence[int]]) -> list[int]:
    return [sum(bucket) for bucket in zip_longest(*by_bucket, fillvalue=0)]


def _difference(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """A model that has left takes its counts along: a bucket does not count below zero."""
    return [max(0, new - old) for old, new in zip_longest(before, after, fillvalue=0)]
