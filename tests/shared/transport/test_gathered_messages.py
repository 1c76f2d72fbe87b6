"""Messages in groups."""

from __future__ import annotations

import asyncio

from shared.transport.gathered_messages import GatheredMessages
from tests.support.waiting import LIMIT_S


async def test_first_message_is_handed_over_at_once_and_the_next_together() -> None:
    groups: list[list[str]] = []
    began: list[float] = []
    loop, third = asyncio.get_running_loop(), asyncio.Event()

    def handle(subject: str, data: bytes) -> None:
        if not began or loop.time() - began[-1] >= 0.01:
            began.append(loop.time())
            groups.append([])
        groups[-1].append(subject)
        if subject == "c":
            third.set()

    gathered = GatheredMessages(handle, 0.02)
    gathered.add("a", b"")
    assert groups == [["a"]]
    gathered.add("b", b"")
    gathered.add("c", b"")
    assert groups == [["a"]]
    async with asyncio.timeout(LIMIT_S):
        await third.wait()
    assert groups == [["a"], ["b", "c"]]
    gathered.add("d", b"")
    gathered.close()
    assert not gathered._waiting and groups == [["a"], ["b", "c"]], "what waits is dropped"
