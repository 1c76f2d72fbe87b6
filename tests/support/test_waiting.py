"""A wait that ends without its condition says which, and what it saw."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.support.waiting import NotReached, until, until_changed, wait_until


async def _count() -> int:
    return 0


async def test_waits_say_what_they_waited_for() -> None:
    states = ["cold", "starting"]
    expected = re.compile(r"not within 0\.01 s: .*states\[-1\] == 'standby'.*cold.*starting", re.S)
    for wait in (until, wait_until):
        with pytest.raises(NotReached, match=expected):
            waiting = wait(
                lambda: states[-1] == 'standby', timeout_s=0.01, seen=lambda: states
            )  # fmt: skip
            assert waiting is not None
            assert await waiting == [1]
    with pytest.raises(NotReached, match=expected):
        await until_changed(
            lambda: states[-1] == 'standby', asyncio.Event(), timeout_s=0.01, seen=lambda: states
        )  # fmt: skip
    with pytest.raises(NotReached, match="_count"):
        await until(_count, timeout_s=0.01)


async def test_waits_return_the_value() -> None:
    values = [0, 0, 3]
    assert await until(lambda: values.pop(0), poll_s=0) == 3
    assert wait_until(lambda: "found") == "found"
    event, reached = asyncio.Event(), []
    waiting = asyncio.create_task(until_changed(lambda: reached, event))
    await asyncio.sleep(0)
    reached.append(1)
    event.set()
    assert await waiting == [1]
