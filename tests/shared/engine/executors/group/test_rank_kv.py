"""The data plane of one rank: a command that raises fails alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

import pytest

from shared.engine.executors.group.kv.kv_messages import Call, CallFailed, CloseSender, Forget
from shared.engine.executors.group.kv.rank_kv import RankKv
from tests.services.faults.test_item_faults import ERRORS


class Channel:
    """Messages of the leader; ends once each call is answered."""

    def __init__(self, *calls: Call) -> None:
        self.calls, self.sent = calls, []  # type: tuple[Call, ...], list[Any]

    def send(self, message: object) -> None:
        self.sent.append(message)

    async def messages(self) -> AsyncIterator[Call]:
        for call in self.calls:
            yield call
        while len(self.sent) < len(self.calls):
            await asyncio.sleep(0)


@pytest.mark.parametrize("error", ERRORS)
async def test_command_that_raises_fails_alone(error: Exception) -> None:
    calls = (Call(1, Forget(b"p" * 16)), Call(2, CloseSender()))
    channel: Any = Channel(*calls)
    nothing: Any = None

    async def fail() -> None:
        raise error

    with patch.object(RankKv, "_begin", side_effect=[error, fail()]):
        async with asyncio.timeout(20):
            await RankKv(channel, nothing, nothing, "").run()
    assert {each.number for each in channel.sent if isinstance(each, CallFailed)} == {1, 2}
    assert all(type(error).__name__ in each.message for each in channel.sent)
