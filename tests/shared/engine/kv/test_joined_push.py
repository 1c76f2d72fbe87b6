"""Several pushes that succeed or fail as one."""

from __future__ import annotations

import asyncio

import pytest

from shared.engine.kv.joined_push import JoinedPush
from shared.errors import LinkLost
from tests.support.waiting import LIMIT_S


class Part:
    """A push that ends when all is computed, raises `error` then, or is cancelled."""

    def __init__(self, error: Exception | None = None) -> None:
        self.num_computed = 0
        self.has_ended = False
        self._error = error
        self._ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def computed(self, num_computed_tokens: int) -> None:
        self.num_computed = num_computed_tokens
        if self._error is not None:
            self._ended.set_exception(self._error)
        elif num_computed_tokens == 10:
            self._ended.set_result(True)

    def cancel(self) -> None:
        if not self._ended.done():
            self._ended.set_result(False)

    async def run(self) -> bool:
        try:
            return await self._ended
        finally:
            await asyncio.sleep(0)  # a copy that ends
            self.has_ended = True


async def test_all_parts_succeed() -> None:
    parts = [Part(), Part()]
    push = JoinedPush(parts)
    running = asyncio.create_task(push.run())
    push.computed(5)
    await asyncio.sleep(0)
    assert not running.done()
    push.computed(10)
    assert await running
    assert [part.num_computed for part in parts] == [10, 10]


@pytest.mark.parametrize("failing", [0, 1])
async def test_error_of_one_part_cancels_the_others_and_is_raised_after_them(failing: int) -> None:
    parts = [Part(LinkLost("gone") if at == failing else None) for at in range(2)]
    push = JoinedPush(parts)
    running = asyncio.create_task(push.run())
    push.computed(5)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(LinkLost, match="gone"):
            await running
    assert all(part.has_ended for part in parts)


async def test_cancelled_push_has_not_succeeded() -> None:
    push = JoinedPush([Part(), Part()])
    running = asyncio.create_task(push.run())
    push.cancel()
    assert await running is False


async def test_push_without_targets_has_succeeded() -> None:
    assert await JoinedPush([]).run()
