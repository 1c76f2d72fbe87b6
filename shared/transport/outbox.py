"""Sends messages for synchronous code: in order, on a separate task."""

from __future__ import annotations

import asyncio

import structlog

from shared.background import Background, item_error
from shared.errors import HearthError
from shared.messages import Message
from shared.transport.bus import Bus

log = structlog.get_logger(__name__)

MAX_QUEUED = 4096  # while the bus is stalled; nats-py buffers a further 64 MiB


class Outbox:
    """A queue of messages to send. One that cannot be sent is dropped and counted: every receiver
    can request it again.
    """

    def __init__(self, bus: Bus) -> None:
        self.num_dropped = 0
        self._bus = bus
        self._queue: asyncio.Queue[tuple[str, Message]] = asyncio.Queue(MAX_QUEUED)
        self._background = Background()

    def start(self) -> None:
        self._background.start_own(self._run())

    def post(self, subject: str, message: Message) -> None:
        if self._queue.full():
            self._drop(subject, "the queue is full")
        else:
            self._queue.put_nowait((subject, message))

    async def stop(self) -> None:
        """Sends the queued messages for at most 1 s, then stops."""
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
                self._drop(subject, error.message)
            except BaseException as raised:  # a value cannot be encoded: its message alone fails
                self._drop(subject, repr(item_error(raised)))
            finally:
                self._queue.task_done()

    def _drop(self, subject: str, reason: str) -> None:
        self.num_dropped += 1
        log.warning(
            "outbox_message_dropped", subject=subject, error=reason, num_dropped=self.num_dropped
        )
