"""Virtual time: an event loop whose clock jumps to the next timer as soon as nothing else can run.

Ten virtual minutes of heartbeats and leases pass in a moment, and two runs are equal event by event
as long as nothing asks the machine for time, chance or I/O.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Where a real selector would wait for the next timer, this one moves the clock there."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("deadlock: every task waits and no timer is set")
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _JumpingSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


class VirtualClock:
    """The `Clock` of the loop that asks."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)


def run(coroutine: Coroutine[Any, Any, T], *, limit_s: float = 3600.0) -> T:
    """Runs to its end in virtual time; raises TimeoutError after `limit_s` of it."""

    async def bounded() -> T:
        async with asyncio.timeout(limit_s):
            return await coroutine

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(bounded())
