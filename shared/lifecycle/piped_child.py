"""A child process with pipes, whose start does not block the event loop.

uvloop forks on the loop: it copies the page tables of the process and waits until the child has got
a core and runs its program, on a busy machine 45 to 200 ms. `Popen` uses vfork, which copies
nothing, and waits on a thread.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from shared.background import start_awaited


class PipedChild:
    """A child process with pipes. The event loop reaps it when it ends.

    A write to `stdin` of an ended child raises OSError or RuntimeError, or is dropped. `stdout`
    returns the rest of the child's output, then EOF.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        pidfd: int,
        stdin: asyncio.WriteTransport,
        stdout: asyncio.StreamReader,
    ) -> None:
        self.stdin, self.stdout = stdin, stdout
        self._process = process
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = loop.create_future()
        self._pidfd = pidfd
        loop.add_reader(pidfd, self._reap)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Negative: minus the signal that ended it. None: it runs, or is not reaped yet."""
        return self._process.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.stdin.close()
        self._ended.set_result(self._process.wait())


class _OutputReader(asyncio.StreamReaderProtocol):
    def eof_received(self) -> bool:
        """Returns False, which closes the pipe."""
        super().eof_received()
        return False


async def start_piped(command: Sequence[str], environ: Mapping[str, str]) -> PipedChild:
    """Starts a child with pipes. Raises OSError. If the caller is cancelled, the child is
    killed.
    """
    starting = start_awaited(_started(command, environ), OSError)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_kill_started)
        raise


async def _started(command: Sequence[str], environ: Mapping[str, str]) -> PipedChild:
    process, pidfd = await asyncio.to_thread(_popen, command, environ)
    loop, stdout = asyncio.get_running_loop(), asyncio.StreamReader()
    stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
    await loop.connect_read_pipe(lambda: _OutputReader(stdout), process.stdout)
    return PipedChild(process, pidfd, stdin, stdout)


def _popen(
    command: Sequence[str], environ: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], int]:
    """Returns the process, and a descriptor of it."""
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    try:
        return process, os.pidfd_open(process.pid)
    except OSError:  # no descriptor is left
        process.kill()
        process.communicate()
        raise


def _kill_started(starting: asyncio.Task[PipedChild]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().kill()
