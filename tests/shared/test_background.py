from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
from structlog.testing import capture_logs

from shared.background import TASK_FAILED, Background, failing_alone, start_awaited
from shared.store import StoreUnavailable
from tests.support.waiting import LIMIT_S


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
    task = background.start_own(wait_forever())
    await asyncio.sleep(0)
    async with asyncio.timeout(LIMIT_S):
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
    background.start_own(run_with_cleanup())
    await asyncio.sleep(0)
    await background.stop()
    assert done == [1]
    await background.stop()


@pytest.mark.parametrize(
    "error",
    [
        *(RuntimeError("a bug"), OverflowError("too big"), KeyError("x"), OSError(5, "EIO")),
        BaseException("a panic of native code"),
    ],
)
async def test_item_fails_alone_and_a_loop_of_the_process_does_not(error: BaseException) -> None:
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    failed: list[Exception] = []

    async def work() -> None:
        raise error

    def fail(raised: Exception) -> None:
        failed.append(raised)
        raise ValueError("the item cannot even be failed")

    background = Background()
    await background.start_item(work(), fail)
    with failing_alone("one_of_many"):
        await work()
    assert [str(error) in str(each) for each in failed] == [True]
    assert reported == []
    own = background.start_own(work())
    await asyncio.wait({own})
    await asyncio.sleep(0)
    (context,) = reported
    assert (context["message"], context["exception"]) == (TASK_FAILED, error)


@pytest.mark.parametrize("kind", [asyncio.CancelledError, KeyboardInterrupt, SystemExit])
def test_what_ends_more_than_an_item_passes(kind: type[BaseException]) -> None:
    with pytest.raises(kind), failing_alone("one_of_many"):
        raise kind


async def test_item_that_is_cancelled_does_not_fail() -> None:
    failed: list[Exception] = []
    background = Background()
    background.start_item(asyncio.sleep(60), failed.append)
    await background.stop()
    assert failed == []


async def test_error_of_awaited_work_reaches_its_callers_and_is_logged_if_unexpected() -> None:
    async def work(error: Exception) -> None:
        raise error

    expected, bug = (StoreUnavailable("away"), OSError(5, "EIO")), KeyError("x")
    with capture_logs() as logs:
        for error in (*expected, bug):
            task = start_awaited(work(error), OSError)
            with pytest.raises(type(error)):
                await asyncio.shield(task)
        abandoned = start_awaited(work(bug))
        await asyncio.wait({abandoned})
        await asyncio.sleep(0)
    assert [each["exc_info"] for each in logs] == [bug, bug]


async def test_awaited_work_without_a_caller_is_not_collected() -> None:
    class Peer:
        """What the task waits for refers to the task alone, and nothing else to both."""

        def __init__(self) -> None:
            self.reply: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def work(self) -> None:
            await self.reply

    peer = Peer()
    alive = weakref.ref(start_awaited(peer.work()))
    await asyncio.sleep(0)
    reply = weakref.ref(peer.reply)
    del peer
    gc.collect()
    task = alive()
    assert task is not None and reply() is not None
    task.cancel()
