"""Virtual time: an event loop whose clock jumps to the next timer as soon as nothing else can run.

Ten virtual minutes of heartbeats and leases pass in a moment, and two runs are equal event by event
as long as nothing uses the machine's clock, randomness or I/O.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import TimerHandle
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, TypeVar

from tests.support.world.process import owned_task

T = TypeVar("T")


class _Handle(TimerHandle):
    """A callback, with or without a time. Unused fields of the base class stay unset."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> None:
        self._callback: Callable[..., object] | None = callback
        self._args = args
        self._context = copy_context() if context is None else context

    def cancel(self) -> None:
        self._callback, self._args = None, ()

    def cancelled(self) -> bool:
        return self._callback is None


class VirtualLoop(asyncio.BaseEventLoop):
    """No I/O, no threads. Timers are tuples in a heap: compared in C, in insertion order.

    A schedule is some thousand short callbacks, so the base's path from one to the next is
    shortened.
    """

    get_debug = staticmethod(bool)  # always False; every new future calls it

    def __init__(self) -> None:
        super().__init__()
        self.set_task_factory(owned_task)  # type: ignore[arg-type]
        self._now = 0.0
        self._timers: list[tuple[float, int, _Handle]] = []
        self._num_timers = 0

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Handle:
        handle = _Handle(callback, args, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> _Handle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> _Handle:
        timer = _Handle(callback, args, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, timer))
        return timer

    def _run_once(self) -> None:
        """Runs until stopped; callbacks that are ready together all run."""
        ready = self._ready  # type: ignore[attr-defined]
        while True:
            if not ready and not self._stopping:  # type: ignore[attr-defined]
                self._jump()
            for _ in range(len(ready)):
                handle = ready.popleft()
                if handle._callback is not None:
                    try:
                        handle._context.run(handle._callback, *handle._args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:
                        self._report(handle, error)
            if self._stopping:  # type: ignore[attr-defined]
                return

    def _report(self, handle: _Handle, error: BaseException) -> None:
        message = f"Exception in callback {handle._callback!r}"
        self.call_exception_handler({"message": message, "exception": error})

    def _jump(self) -> None:
        timers, ready = self._timers, self._ready  # type: ignore[attr-defined]
        while timers and timers[0][2]._callback is None:
            heapq.heappop(timers)
        if not timers:
            raise RuntimeError("deadlock: every task waits and no timer is set")
        self._now = now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= now:
            ready.append(heapq.heappop(timers)[2])

    def _start_serving(self, *args: Any) -> None:
        """A server may listen, but nothing connects to it."""

    def _stop_serving(self, *args: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        raise RuntimeError("a thread: its time is not virtual")


class VirtualClock:
    """The `Clock` of the running loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)


def run(coroutine: Coroutine[Any, Any, T], *, limit_s: float = 3600.0) -> T:
    """Runs the coroutine in virtual time; raises TimeoutError after `limit_s` of it."""

    async def bounded() -> T:
        async with asyncio.timeout(limit_s):
            return await coroutine

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(bounded())
