"""Virtual time: an event loop whose clock jumps to the next timer as soon as nothing else can run.

Ten virtual minutes of heartbeats and leases pass in a moment, and two runs are equal event by event
as long as nothing asks the machine for time, chance or I/O.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import TimerHandle
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from tests.simulation.process import owned_task

T = TypeVar("T")


class VirtualLoop(asyncio.BaseEventLoop):
    """No I/O, no threads. Timers are tuples in a heap: compared in C, in order of their setting."""

    def __init__(self) -> None:
        super().__init__()
        self.set_task_factory(owned_task)  # type: ignore[arg-type]
        self._now = 0.0
        self._timers: list[tuple[float, int, TimerHandle]] = []
        self._num_timers = 0

    def time(self) -> float:
        return self._now

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> TimerHandle:
        timer = TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, timer))
        return timer

    def _timer_handle_cancelled(self, handle: TimerHandle) -> None:
        """It leaves the heap when its time has come."""

    def _run_once(self) -> None:
        ready = self._ready  # type: ignore[attr-defined]
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            self._jump()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _jump(self) -> None:
        timers, ready = self._timers, self._ready  # type: ignore[attr-defined]
        while timers and timers[0][2]._cancelled:  # type: ignore[attr-defined]
            heapq.heappop(timers)
        if not timers:
            raise RuntimeError("deadlock: every task waits and no timer is set")
        self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])

    def _start_serving(self, *args: Any) -> None:
        """A server may listen; nobody reaches it."""

    def _stop_serving(self, *args: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        raise RuntimeError("a thread: its time is not virtual")


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
