"""Tasks that live as long as their owner, and that no caller awaits.

A loop of the process itself that raises is a bug. Its exception goes to the event loop's exception
handler, which ends a service process: peers notice that, but not a hang with good health checks.

Work on one item of others (a client's request, a tenant's record, a reply of Redis, a model, a
peer) that raises ends the item alone: others would lose theirs with the process. `num_failed_items`
counts them in this process.

`start_awaited` is for work that has callers, who get its exception. No other place starts a task:
asyncio holds tasks weakly, and an exception that nobody awaits stays in the task unseen.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

import structlog

from shared.errors import HearthError

log = structlog.get_logger(__name__)

TASK_FAILED = "a background task failed"
CANCEL_AGAIN_S = 1.0  # longer than any task needs to end after its cancellation
T = TypeVar("T")
EXITS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)
_awaited: set[asyncio.Future[Any]] = set()
_failed = Counter[str]()  # key: event


class NativePanic(RuntimeError):
    """A panic of native code, such as a tokenizer's or a grammar's. The original is no
    Exception.
    """


def item_error(raised: BaseException) -> Exception:
    """Returns what ends one item: `raised`, or a NativePanic. Raises what ends more than the item:
    a cancellation, or the process's exit.
    """
    if isinstance(raised, Exception):
        return raised
    if isinstance(raised, EXITS):
        raise raised
    return NativePanic(f"{type(raised).__name__}: {raised}")


class Background:
    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}  # tasks in start order

    def start_own(self, loop: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Starts a loop, or a step in the life, of the process itself."""
        return self._start(loop)

    def start_item(
        self, work: Coroutine[object, object, None], fail: Callable[[Exception], None]
    ) -> asyncio.Task[None]:
        """Starts work on one item of others. `fail` ends the item with whatever the work raised."""
        task = self._start(_item(work, fail))
        task.add_done_callback(lambda _: work.close())  # cancelled before it began
        return task

    def _start(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def __len__(self) -> int:
        return len(self._tasks)

    async def idle(self) -> None:
        """Returns when all tasks of now have ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def stop(self) -> None:
        """Cancels all tasks and returns when they have ended.

        Python 3.11's `wait_for` swallows a cancellation that coincides with its result, so tasks
        that continue are cancelled again.
        """
        left: Collection[asyncio.Task[None]] = tuple(self._tasks)
        while left:
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if task.cancelled() or task.exception() is None:
            return
        context = {"message": TASK_FAILED, "exception": task.exception()}
        task.get_loop().call_exception_handler(context)


async def _item(work: Coroutine[object, object, None], fail: Callable[[Exception], None]) -> None:
    try:
        await work
    except BaseException as raised:
        error = item_error(raised)
        _count_failed("item_failed", work=getattr(work, "__qualname__", repr(work)))
        with failing_alone("item_not_ended"):
            fail(error)


def start_awaited(work: Awaitable[T], *expected: type[Exception]) -> asyncio.Task[T]:
    """Starts work that others await or cancel. They may all have left when it raises: what is
    neither a HearthError nor `expected` is logged, too.
    """
    task = asyncio.ensure_future(work)
    _awaited.add(task)
    task.add_done_callback(partial(_awaited_ended, (HearthError, *expected)))
    return task


def _awaited_ended(expected: tuple[type[Exception], ...], task: asyncio.Future[Any]) -> None:
    _awaited.discard(task)
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, (*EXITS, *expected)):
        log.error("awaited_work_failed", task=repr(task), exc_info=error)


@contextlib.contextmanager
def failing_alone(event: str, **fields: object) -> Iterator[None]:
    """Guards one item within a loop of the process: its exception is logged, and the
    loop goes on.
    """
    try:
        yield
    except BaseException as raised:
        failed_alone(raised, event, **fields)


def failed_alone(raised: BaseException, event: str, **fields: object) -> None:
    """Logs the exception of one item, within its handler. Raises what ends more than the item."""
    item_error(raised)
    _count_failed(event, **fields)


def _count_failed(event: str, **fields: object) -> None:
    _failed[event] += 1
    log.exception(event, **fields)


def num_failed_items() -> int:
    """Returns the number of items whose work raised since this process started."""
    return _failed.total()


def is_logged(error: Exception) -> None:
    """Does nothing: it is the `fail` of an item that has nothing to end."""
