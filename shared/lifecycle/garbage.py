"""Decides when a service collects cyclic garbage from its whole heap.

Reference counts free nearly all that a request leaves; a full collection finds a few cycles. It
visits every container of the process, during which the event loop stands still: some 60 ms beside a
thousand streams. So Python collects young objects alone, a few milliseconds at a time, and a full
collection runs when the process is idle, or when memory has grown since the last one.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from dataclasses import dataclass

from shared.clock import Clock

# Objects before a collection of the youngest, and such collections before one of those that
# survived it: each visits so few that it takes less than a turn of a busy event loop.
MAX_YOUNG_OBJECTS = 1_000
MAX_YOUNG_COLLECTIONS = 4
NEVER = 1_000_000_000
CHECK_S = 1.0
IDLE_S = 0.1  # the last moment counts besides CHECK_S: work that has just begun
MAX_IDLE_SHARE = 0.1  # share of one core
MAX_GROWTH_BYTES = 64 << 20
MIN_INTERVAL_S = 10.0  # the least interval in a busy process
MAX_INTERVAL_S = 300.0


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Seconds of a clock, CPU seconds of the process, and the most bytes that it has had."""

    now: float
    cpu_s: float
    peak_bytes: int


class CollectionPolicy:
    """The decision when to collect garbage. `usage` is the process's usage at the last full
    collection.
    """

    def __init__(self, usage: ProcessUsage) -> None:
        self._collected = usage

    def is_due(self, long_before: ProcessUsage, before: ProcessUsage, now: ProcessUsage) -> bool:
        """Whether to collect, given the usage `now`, about IDLE_S ago and CHECK_S before that. A
        service that waits a moment for its peers, with a thousand streams open, is not idle.
        """
        elapsed_s = now.now - self._collected.now
        is_idle = _is_idle(long_before, now) and _is_idle(before, now)
        has_grown = now.peak_bytes - self._collected.peak_bytes >= MAX_GROWTH_BYTES
        return is_idle or elapsed_s >= MAX_INTERVAL_S or (has_grown and elapsed_s >= MIN_INTERVAL_S)

    def collected(self, usage: ProcessUsage) -> None:
        self._collected = usage


def _is_idle(before: ProcessUsage, now: ProcessUsage) -> bool:
    return now.cpu_s - before.cpu_s <= MAX_IDLE_SHARE * (now.now - before.now)


def freeze_heap() -> None:
    """Excludes modules and tables from collections, as they live as long as the process. Later
    collections cover young objects alone.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(MAX_YOUNG_OBJECTS, MAX_YOUNG_COLLECTIONS, NEVER)


async def collect_garbage(clock: Clock) -> None:
    """Runs full collections for as long as the process lives. Call after `freeze_heap`."""
    policy = CollectionPolicy(_usage(clock))
    while True:
        long_before = _usage(clock)
        await clock.sleep(CHECK_S)
        if not has_survivors():
            continue
        before = _usage(clock)
        await clock.sleep(IDLE_S)
        if policy.is_due(long_before, before, _usage(clock)):
            gc.collect()
            policy.collected(_usage(clock))


def has_survivors() -> bool:
    """Whether young objects have become old ones since the last full collection."""
    return gc.get_count()[2] > 0


def _usage(clock: Clock) -> ProcessUsage:
    unit = 1 if sys.platform == "darwin" else 1024
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return ProcessUsage(clock.now(), time.process_time(), peak_bytes)
