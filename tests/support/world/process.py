"""A process as seen by all others: every message, byte or timer reaches it through this module.

A frozen process (SIGSTOP) receives nothing and does nothing; its clock continues. When it is
thawed, its timers are overdue and its sockets full. A dead one (SIGKILL) never receives anything
again and its tasks are gone.

    running ──freeze──▶ frozen ──thaw──▶ running
       └───────kill───────┴───────────▶ dead
"""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from functools import cached_property, partial
from typing import Any

BACKLOG_STEP_S = 30e-6

_current: ContextVar[SimulatedProcess | None] = ContextVar("process", default=None)


class SimulatedProcess:
    def __init__(self, process_id: str) -> None:
        self.process_id = process_id
        self.is_frozen = False
        self.is_dead = False
        self.slowness = 1.0  # the factor by which its engine is slower
        self.is_wedged = False  # the engine's device hangs, all else responds
        self.context: Context = copy_context()
        self.context.run(_current.set, self)
        self._unwedged = asyncio.Event()
        self._overdue: list[Callable[[], object]] = []
        self._arrived: deque[Callable[[], object]] = deque()
        self._tasks: list[asyncio.Task[Any]] = []
        self._prune_at = 64

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Cached for the process's lifetime: asyncio's lookup costs a system call each time."""
        return asyncio.get_running_loop()

    # ── arrivals ─────────────────────────────────────────────────────────────────────────────────

    def arrive(self, act: Callable[..., object], *args: object) -> None:
        """Runs `act` now, or once the process is awake; never if it is dead."""
        if self.is_dead:
            return
        if self.is_frozen or self._arrived:
            self._arrived.append(partial(act, *args))
        else:
            self.context.copy().run(act, *args)  # a caller may have entered the context already

    def call_later(self, delay_s: float, act: Callable[[], object]) -> TimerHandle:
        """Starts a timer of this process."""
        return self.loop.call_later(delay_s, self._due, act, context=self.context)

    def _due(self, act: Callable[..., object], *args: object) -> None:
        if self.is_dead:
            return
        if self.is_frozen:
            self._overdue.append(partial(act, *args))
        else:
            act(*args)

    # ── faults ───────────────────────────────────────────────────────────────────────────────────

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self, *, backlog_after_s: float | None = None) -> None:
        """Runs overdue timers immediately. Its sockets' data is processed in the order of arrival:
        before them, or `backlog_after_s` later and one by one, as a loop reads it.
        """
        self.is_frozen = False
        overdue, self._overdue = self._overdue, []
        if backlog_after_s is None:
            arrived, self._arrived = self._arrived, deque()
            for act in arrived:
                self.arrive(act)
        for act in overdue:
            self.context.copy().run(self._due, act)
        if self._arrived and backlog_after_s is not None:
            asyncio.get_running_loop().call_later(backlog_after_s, self._take_backlog)

    def _take_backlog(self) -> None:
        if self.is_frozen or self.is_dead or not self._arrived:
            return
        self.context.copy().run(self._arrived.popleft())
        asyncio.get_running_loop().call_later(BACKLOG_STEP_S, self._take_backlog)

    def wedge(self) -> None:
        self.is_wedged = True
        self._unwedged.clear()

    def unwedge(self) -> None:
        self.is_wedged = False
        self._unwedged.set()

    async def unwedged(self) -> None:
        while self.is_wedged:
            await self._unwedged.wait()

    def die(self) -> None:
        """Stops everything in it; effects of its ending tasks on other processes are dropped."""
        self.is_dead = True
        self._overdue.clear()
        self._arrived.clear()
        for task in self.live_tasks():
            task.cancel()

    async def gone(self) -> None:
        await asyncio.gather(*self.live_tasks(), return_exceptions=True)

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.context.copy().run(asyncio.get_running_loop().create_task, coroutine)

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self._tasks.append(task)
        if len(self._tasks) > self._prune_at:
            self._tasks = self.live_tasks()
            self._prune_at = 2 * len(self._tasks) + 64

    def live_tasks(self) -> list[asyncio.Task[Any]]:
        return [task for task in self._tasks if not task.done()]

    def task_names(self) -> Counter[str]:
        """Returns the number of live tasks, by the coroutine's name."""
        return Counter(task.get_coro().__qualname__ for task in self.live_tasks())  # type: ignore[union-attr]


def owned_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any],
    context: Context | None = None,
) -> asyncio.Task[Any]:
    """Returns the loop's task factory: a task belongs to the process that started it."""
    task = asyncio.Task(coroutine, loop=loop, context=context)
    owner = _current.get() if context is None else context.get(_current)
    if owner is not None:
        owner.adopt(task)
    return task


class ProcessClock:
    """The `Clock` of one process. If `is_engine`, it is slowed with its process."""

    def __init__(self, process: SimulatedProcess, *, is_engine: bool = False) -> None:
        self._process = process
        self._is_engine = is_engine

    def now(self) -> float:
        return self._process.loop.time()

    async def sleep(self, delay_s: float) -> None:
        if self._is_engine:
            delay_s *= self._process.slowness
            await self._process.unwedged()
        loop = self._process.loop
        woken: asyncio.Future[None] = asyncio.Future(loop=loop)
        timer = loop.call_later(
            delay_s, self._process._due, _wake, woken, context=self._process.context
        )
        try:
            await woken
        except asyncio.CancelledError:
            timer.cancel()
            raise


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)
