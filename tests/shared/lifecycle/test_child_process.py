from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator

import pytest

from shared.lifecycle.child_process import send_signal


@pytest.fixture
async def waits_in_the_loop() -> AsyncIterator[None]:
    """As from Python 3.12 on; before, a thread waits, and is mostly quicker than this test."""
    if sys.version_info >= (3, 12):
        yield
        return
    before, watcher = asyncio.get_child_watcher(), asyncio.PidfdChildWatcher()
    watcher.attach_loop(asyncio.get_running_loop())
    asyncio.set_child_watcher(watcher)
    yield
    asyncio.set_child_watcher(before)
    watcher.close()


@pytest.mark.usefixtures("waits_in_the_loop")
async def test_a_signal_takes_no_exit_status_away(caplog: pytest.LogCaptureFixture) -> None:
    process = await child("raise SystemExit(7)")
    wait_unseen(process)
    send_signal(process, signal.SIGTERM)
    assert await process.wait() == 7
    assert caplog.records == []


async def test_a_signal_arrives() -> None:
    process = await child("import time; time.sleep(60)")
    send_signal(process, signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL


async def test_who_is_gone_gets_none() -> None:
    process = await child("")
    assert await process.wait() == 0
    send_signal(process, signal.SIGKILL)


async def child(code: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", code)


def wait_unseen(process: Process) -> None:
    """Until it has ended; the event loop stands still and does not notice."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
