"""Pins the gateway's main process to one core, and everything else to another.

Ratios then show how the gateway shares its own time among tenants, not how the kernel shares a core
among processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.serving.cluster import Processes

WATCH_S = 0.02  # a process that the gateway starts is moved after this time


def two_cores() -> tuple[int, int]:
    """Returns the gateway's core and the core of all others; the same one where there is only
    one.
    """
    cores = sorted(os.sched_getaffinity(0))
    return cores[0], cores[min(1, len(cores) - 1)]


@asynccontextmanager
async def pinned(processes: Processes) -> AsyncIterator[None]:
    """Pins processes to cores, also the preparation processes that the gateway starts meanwhile."""
    own, others = two_cores()
    before = os.sched_getaffinity(0)
    gateway = processes["gateway"].pid
    for each in processes.values():
        _pin(each.pid, own if each.pid == gateway else others)
    _pin(os.getpid(), others)
    watching = asyncio.create_task(_watch(gateway, others))
    try:
        yield
    finally:
        watching.cancel()
        os.sched_setaffinity(0, before)


async def _watch(gateway: int, core: int) -> None:
    while True:
        for each in _children(gateway):
            if _is_elsewhere(each, core):
                _pin(each, core)
        await asyncio.sleep(WATCH_S)


def _children(pid: int) -> Iterable[int]:
    try:
        return map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    except OSError:
        return ()


def _is_elsewhere(pid: int, core: int) -> bool:
    try:
        return os.sched_getaffinity(pid) != {core}
    except ProcessLookupError:
        return False


def _pin(pid: int, core: int) -> None:
    """All threads of a process; new ones inherit it."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})
