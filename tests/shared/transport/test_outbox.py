from __future__ import annotations

import asyncio

from shared.messages import Done, Message
from shared.transport.outbox import MAX_QUEUED, Outbox


class StandingBus:
    """Takes nothing before it is told to."""

    def __init__(self) -> None:
        self.goes = asyncio.Event()
        self.num_sent = 0

    async def publish(self, subject: str, message: Message) -> None:
        await self.goes.wait()
        self.num_sent += 1


async def test_what_waits_for_a_bus_that_stands_still_is_bounded() -> None:
    bus = StandingBus()
    outbox = Outbox(bus)  # type: ignore[arg-type]
    outbox.start()
    for _ in range(MAX_QUEUED + 100):
        outbox.post("subject", Done())
    assert outbox.num_dropped == 100
    bus.goes.set()
    await outbox.stop()
    assert bus.num_sent == MAX_QUEUED
