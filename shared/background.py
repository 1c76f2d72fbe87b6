"""Tasks that live as long as their owner.

One that breaks is a bug nobody awaits. It is handed to the loop's exception handler, which in a
service process ends the process: better lost and noticed than wedged with green health.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine

BROKE = "a background task broke"
CANCEL_AGAIN_S = 1.0  # more than any needs to end once it has noticed


class Background:
    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}  # in the order of their starts

    def start(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    async def stop(self) -> None:
        """Cancels all and returns when they have ended.

        Python 3.11's `wait_for` swallows a cancellation that meets its result, so those that go on
        are cancelled again.
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
        context = {"message": BROKE, "exception": task.exception()}
        task.get_loop().call_exception_handler(context)
