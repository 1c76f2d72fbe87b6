from __future__ import annotations

import asyncio

from shared.background import Background


async def test_swallowed_cancellation_is_repeated() -> None:
    """Python 3.11's `wait_for` swallows a cancellation that coincides with its result."""
    reply: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    num_swallowed = 0

    async def wait_forever() -> None:
        nonlocal num_swallowed
        while True:
            try:
                await asyncio.shield(reply)
            except asyncio.CancelledError:
                if num_swallowed:
                    raise
            num_swallowed += 1

    background = Background()
    task = background.start(wait_forever())
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await background.stop()
    assert task.cancelled() and num_swallowed == 1


async def test_stop_waits_for_cleanup_of_tasks() -> None:
    done: list[int] = []

    async def run_with_cleanup() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            done.append(1)

    background = Background()
    background.start(run_with_cleanup())
    await asyncio.sleep(0)
    await background.stop()
    assert done == [1]
    await background.stop()
