"""Tasks that live as long as their owner.

A task that raises is a bug, and no caller awaits it. Its exception goes to the loop's exception
handler, which ends a service process: peers notice that, but not a hang with good health checks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine

TASK_FAILED = "a background task failed"
CANCEL_AGAIN_S = 1.0  # longer than any task needs to end after its cancellation


class Background:
    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}  # in start order

    def start(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

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
