from __future__ import annotations

import asyncio

from shared.messages import Done, Message
from shared.transport.outbox import MAX_QUEUED, Outbox


class StalledBus:
    """`publish` waits for `resume`."""

    def __init__(self) -> None:
        self.resume = asyncio.Event()
        self.num_sent = 0

    async def publish(self, subject: str, message: Message) -> None:
        await self.resume.wait()
        self.num_sent += 1


async def test_queue_is_bounded_while_bus_is_stalled() -> None:
    bus = StalledBus()
    outbox = Outbox(bus)  # type: ignore[arg-type]
    outbox.start()
    for _ in range(MAX_QUEUED + 100):
        outbox.post("subject", Done())
    assert outbox.num_dropped == 100
    bus.resume.set()
    await outbox.stop()
    assert bus.num_sent == MAX_QUEUED
