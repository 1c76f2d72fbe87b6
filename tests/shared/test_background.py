from __future__ import annotations

import asyncio

from shared.background import Background


async def test_a_cancellation_that_is_swallowed_is_repeated() -> None:
    """As by `wait_for` in a loop that flushes a connection: its answer came in that moment."""
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    num_rounds = 0

    async def ask_for_ever() -> None:
        nonlocal num_rounds
        while True:
            try:
                await asyncio.shield(answer)
            except asyncio.CancelledError:
                if num_rounds:
                    raise
            num_rounds += 1

    background = Background()
    task = background.start(ask_for_ever())
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await background.stop()
    assert task.cancelled() and num_rounds == 1


async def test_stopping_waits_for_what_tasks_do_at_their_end() -> None:
    done: list[int] = []

    async def take_leave() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            done.append(1)

    background = Background()
    background.start(take_leave())
    await asyncio.sleep(0)
    await background.stop()
    assert done == [1]
    await background.stop()
