"""Lets synchronous logic send: messages go out in order, on a task of their own."""

from __future__ import annotations

import asyncio

import structlog

from shared.background import Background
from shared.bus import Bus
from shared.errors import HearthError
from shared.messages import Message

log = structlog.get_logger(__name__)


class Outbox:
    """A message that cannot be sent is logged and dropped: every receiver can ask again."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._queue: asyncio.Queue[tuple[str, Message]] = asyncio.Queue()
        self._background = Background()

    def start(self) -> None:
        self._background.start(self._run())

    def post(self, subject: str, message: Message) -> None:
        self._queue.put_nowait((subject, message))

    async def stop(self) -> None:
        """Sends what is queued, for at most a second, then ends."""
        try:
            async with asyncio.timeout(1.0):
                await self._queue.join()
        except TimeoutError:
            log.warning("outbox_not_empty", num_messages=self._queue.qsize())
        await self._background.stop()

    async def _run(self) -> None:
        while True:
            subject, message = await self._queue.get()
            try:
                await self._bus.publish(subject, message)
            except HearthError as error:
                log.warning("not_sent", subject=subject, error=error.message)
            finally:
                self._queue.task_done()
