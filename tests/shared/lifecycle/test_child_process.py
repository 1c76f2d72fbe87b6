from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator

import pytest

from shared.lifecycle.child_process import ROOT, child_environ, engine_environ, send_signal


@pytest.fixture
async def pidfd_child_watcher() -> AsyncIterator[None]:
    """The event loop waits for children, as by default since Python 3.12.

    Python 3.11 waits on a thread, which usually reaps the child before the test sends its signal.
    """
    if sys.version_info >= (3, 12):
        yield
        return
    before, watcher = asyncio.get_child_watcher(), asyncio.PidfdChildWatcher()
    watcher.attach_loop(asyncio.get_running_loop())
    asyncio.set_child_watcher(watcher)
    yield
    asyncio.set_child_watcher(before)
    watcher.close()


@pytest.mark.usefixtures("pidfd_child_watcher")
async def test_signal_preserves_exit_status(caplog: pytest.LogCaptureFixture) -> None:
    process = await start_child("raise SystemExit(7)")
    wait_without_reaping(process)
    send_signal(process, signal.SIGTERM)
    assert await process.wait() == 7
    assert caplog.records == []


async def test_signal_reaches_child() -> None:
    process = await start_child("import time; time.sleep(60)")
    send_signal(process, signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL


async def test_signal_to_ended_child_is_ignored() -> None:
    process = await start_child("")
    assert await process.wait() == 0
    send_signal(process, signal.SIGKILL)


async def start_child(code: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", code)


def wait_without_reaping(process: Process) -> None:
    """Blocks the event loop until the child has ended, so that the loop cannot reap it."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_child_inherits_what_it_needs_and_no_secret() -> None:
    secrets = {
        "HEARTH_NATS_URL": "nats://gateway-1:s@host",
        "HEARTH_CLUSTER_SECRET": "s",
        "HEARTH_OPERATOR_TOKEN": "s",
        "HEARTH_PASSWORD_OF_TOMORROW": "s",
        "HF_TOKEN": "s",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=s",
        "AWS_SECRET_ACCESS_KEY": "s",
        "OPENAI_API_KEY": "s",
    }
    usual = {"PATH": "/bin", "HOME": "/h", "LC_ALL": "C", "HEARTH_CACHE_DIR": "/c"}
    engine = {"CUDA_VISIBLE_DEVICES": "1", "TRITON_CACHE_DIR": "/t", "HF_HUB_CACHE": "/f"}
    given = {**usual, **engine, **secrets, "PYTHONPATH": "/mine"}
    own = {"PYTHONPATH": f"{ROOT}:/mine", "TOKENIZERS_PARALLELISM": "false"}
    assert child_environ(given) == {**usual, **own}
    assert engine_environ(given) == {**usual, **engine, **own}
    wanted = child_environ(given, names=("HF_TOKEN",), prefixes=("OTEL_",))
    assert wanted.keys() - usual.keys() - own.keys() == {"HF_TOKEN", "OTEL_EXPORTER_OTLP_HEADERS"}
