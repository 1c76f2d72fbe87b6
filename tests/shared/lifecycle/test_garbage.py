"""The event loop does not stand still for a full collection while a service is busy."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from shared.lifecycle.garbage import (
    CHECK_S,
    IDLE_S,
    MAX_GROWTH_BYTES,
    MAX_INTERVAL_S,
    MAX_YOUNG_OBJECTS,
    MIN_INTERVAL_S,
    CollectionPolicy,
    ProcessUsage,
    collect_garbage,
    freeze_heap,
)

GROWING = """
import gc
from shared.lifecycle.garbage import freeze_heap
freeze_heap()
before = gc.get_stats()[2]["collections"]
kept = [[] for _ in range(1_500_000)]
print(gc.get_stats()[2]["collections"] - before)
"""


class Node:
    """An object that refers to itself: no reference count frees it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def frozen() -> Iterator[None]:
    thresholds = gc.get_threshold()
    freeze_heap()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_growing_heap_starts_no_full_collection() -> None:
    """In a process of its own: how much Python lets grow depends on how much there is."""
    done = subprocess.run([sys.executable, "-c", GROWING], capture_output=True, check=True)
    assert int(done.stdout) == 0


@pytest.mark.usefixtures("frozen")
def test_garbage_of_young_objects_is_collected() -> None:
    lost = weakref.ref(Node())
    kept = [[] for _ in range(2 * MAX_YOUNG_OBJECTS)]
    assert kept and lost() is None


class SteppedClock:
    """Its `sleep` returns when the test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._may_return = asyncio.Semaphore(0)

    def now(self) -> float:
        return self.seconds

    async def sleep(self, delay_s: float) -> None:
        await self._may_return.acquire()

    async def step(self, seconds: float) -> None:
        self.seconds += seconds
        self._may_return.release()
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.mark.usefixtures("frozen")
async def test_idle_process_collects_what_survived() -> None:
    clock = SteppedClock()
    collecting = asyncio.create_task(collect_garbage(clock))
    await asyncio.sleep(0)
    node = Node()
    lost = weakref.ref(node)
    gc.collect(1)  # it survives, and becomes old
    del node
    await clock.step(CHECK_S)
    await clock.step(1e-9)  # less than the CPU time of this test: the process is busy
    assert lost() is not None
    await clock.step(CHECK_S)
    await clock.step(IDLE_S * 1e6)
    assert lost() is None
    collecting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await collecting


@pytest.mark.parametrize(
    ("after_s", "busy_s", "cpu_s", "growth_bytes", "is_due"),
    [
        (CHECK_S, 0.0, 0.0, 0, True),
        (CHECK_S, 0.0, IDLE_S, 0, False),
        (CHECK_S, CHECK_S / 2, 0.0, 0, False),
        (CHECK_S, 0.0, IDLE_S, MAX_GROWTH_BYTES, False),
        (MIN_INTERVAL_S, 0.0, IDLE_S, MAX_GROWTH_BYTES - 1, False),
        (MIN_INTERVAL_S, 0.0, IDLE_S, MAX_GROWTH_BYTES, True),
        (MAX_INTERVAL_S, 0.0, IDLE_S, 0, True),
    ],
)
def test_busy_process_collects_when_memory_has_grown_or_after_minutes(
    after_s: float, busy_s: float, cpu_s: float, growth_bytes: int, is_due: bool
) -> None:
    policy = CollectionPolicy(ProcessUsage(5.0, 1.0, 100))
    policy.collected(ProcessUsage(7.0, 2.0, 1000))
    now = ProcessUsage(7.0 + after_s, 9.0 + cpu_s, 1000 + growth_bytes)
    before = ProcessUsage(now.now - IDLE_S, 9.0, 1000)
    long_before = ProcessUsage(before.now - CHECK_S, 9.0 - busy_s, 1000)
    assert policy.is_due(long_before, before, now) is is_due
