"""The server of planned faults, with real child processes and its socket."""

from __future__ import annotations

import asyncio
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from services.local.processes.fault_server import FaultServer
from shared.clock import MonotonicClock
from shared.lifecycle.child_process import is_stopped
from shared.lifecycle.faults import FREEZE_S, FaultReply
from tests.support.waiting import until

SLEEPER = (sys.executable, "-c", "import signal; signal.pause()")


class HeldClock(MonotonicClock):
    """Sleeps until the test releases it."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.is_over = asyncio.Event()

    async def sleep(self, duration_s: float) -> None:
        self.slept.append(duration_s)
        await self.is_over.wait()


class Workers:
    def __init__(self, server: FaultServer, clock: HeldClock) -> None:
        self.server = server
        self.clock = clock

    async def ask(self, **fields: str) -> FaultReply:
        body = msgspec.json.encode({"token": self.server.token} | fields)
        return await self.send(body + b"\n")

    async def send(self, line: bytes) -> FaultReply:
        reader, writer = await asyncio.open_unix_connection(self.server.path)
        writer.write(line)
        reply = await reader.readline()
        writer.close()
        return msgspec.json.decode(reply, type=FaultReply)


@pytest.fixture
async def process() -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(*SLEEPER)
    yield started
    if started.returncode is None:
        started.kill()
        await started.wait()


@pytest.fixture
async def workers(process: asyncio.subprocess.Process) -> AsyncIterator[Workers]:
    clock = HeldClock()
    with TemporaryDirectory(dir="/tmp") as folder:
        server = FaultServer(Path(folder), ["decode-1"], {"decode-1": process}.__getitem__, clock)
        await server.start()
        yield Workers(server, clock)
        await server.stop()


async def test_worker_is_killed(workers: Workers, process: asyncio.subprocess.Process) -> None:
    assert await workers.ask() == FaultReply(worker_ids=("decode-1",))
    assert (await workers.ask(fault="kill", worker_id="decode-1")).error == ""
    assert await process.wait() == -9
    again = await workers.ask(fault="freeze", worker_id="decode-1")
    assert again.error == "decode-1 does not run at the moment"


async def test_frozen_worker_thaws(workers: Workers, process: asyncio.subprocess.Process) -> None:
    assert (await workers.ask(fault="freeze", worker_id="decode-1")).error == ""
    await until(lambda: is_stopped(process.pid))
    again = await workers.ask(fault="freeze", worker_id="decode-1")
    assert again.error == "decode-1 is frozen already"
    assert workers.clock.slept == [FREEZE_S]
    workers.clock.is_over.set()
    await until(lambda: not is_stopped(process.pid))


async def test_stop_thaws(workers: Workers, process: asyncio.subprocess.Process) -> None:
    await workers.ask(fault="freeze", worker_id="decode-1")
    await until(lambda: is_stopped(process.pid))
    await workers.server.stop()
    await until(lambda: not is_stopped(process.pid))


async def test_others_are_refused(workers: Workers, process: asyncio.subprocess.Process) -> None:
    kill = {"fault": "kill", "worker_id": "decode-1"}
    for token in ("", "x", workers.server.token + "x"):
        reply = await workers.ask(**kill, token=token)
        assert reply == FaultReply(error="the token is not valid")
    for body in (b"\n", b"[]\n", b'{"fault": "kill"}\n', b"\xff\n"):
        assert await workers.send(body) == FaultReply(error="the request is not valid")
    assert (await workers.ask(**kill | {"fault": "stop"})).error == "the request is not valid"
    other = await workers.ask(**kill | {"worker_id": "nats"})
    assert other.error == "'nats' is no worker that this `hearth up` started"
    assert process.returncode is None
    assert stat.S_IMODE(workers.server.path.stat().st_mode) == 0o600
