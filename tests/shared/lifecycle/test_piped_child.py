"""Children with pipes: what they write, how they end, and what their start costs the loop."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import uvloop

from shared.lifecycle import piped_child
from shared.lifecycle.piped_child import PipedChild, start_piped
from tests.support.waiting import until

ECHO = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read(3))"
ENDLESS = "import time; time.sleep(3600)"
MAX_START_CPU_S = 0.003  # of the loop; uvloop's own fork takes 5 ms and more
BALLAST_BYTES = 256 << 20


async def start(program: str) -> PipedChild:
    return await start_piped([sys.executable, "-S", "-c", program], os.environ)


def descriptors() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


def exists(pid: int) -> bool:
    """Also a zombie does."""
    return Path(f"/proc/{pid}").exists()


async def test_output_status_and_descriptors() -> None:
    await (await start("")).wait()  # the loop's threads and watchers exist
    before = descriptors()
    child = await start(ECHO)
    child.stdin.write(b"abc")
    assert await child.stdout.read() == b"abc"
    assert await child.wait() == child.returncode == 0
    child.kill()  # does nothing
    child = await start("raise SystemExit(7)")
    assert await child.wait() == 7
    assert await child.stdout.read() == b""
    child = await start(ENDLESS)
    child.kill()
    assert (await child.wait(), await child.wait()) == (-signal.SIGKILL, -signal.SIGKILL)
    await until(lambda: descriptors() <= before)
    assert not exists(child.pid)  # reaped


async def test_program_that_does_not_exist() -> None:
    with pytest.raises(FileNotFoundError):
        await start_piped(["/no/such/program"], {})


async def test_child_without_a_descriptor_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = []

    def fail(pid: int) -> int:
        pids.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    before = descriptors()
    monkeypatch.setattr(os, "pidfd_open", fail)
    with pytest.raises(OSError, match="Too many"):
        await start(ENDLESS)
    assert not exists(pids[0])
    assert descriptors() <= before


async def test_child_of_a_cancelled_start_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    pids, popen = [], piped_child._popen

    def record(*given: object) -> object:
        process, pidfd = popen(*given)  # type: ignore[arg-type]
        pids.append(process.pid)
        return process, pidfd

    monkeypatch.setattr(piped_child, "_popen", record)
    starting = asyncio.create_task(start(ENDLESS))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until(lambda: pids and not exists(pids[0]))


def test_start_takes_little_of_the_loop_in_a_large_process() -> None:
    ballast = bytearray(BALLAST_BYTES)
    step = os.sysconf("SC_PAGE_SIZE")
    ballast[::step] = b"x" * (BALLAST_BYTES // step)

    async def cpu_s() -> float:
        before = time.thread_time()
        child = await start("")
        spent = time.thread_time() - before
        await child.wait()
        return spent

    async def lowest_cpu_s() -> float:
        return min([await cpu_s() for _ in range(4)])

    assert uvloop.run(lowest_cpu_s()) < MAX_START_CPU_S
