"""Processes of a gateway's preparation pools by fork: each took half a second of CPU to import.

A server of this process has imported their modules; it forks one for each request. In-process
gateways reach it through `forked_pools`, those of a cluster by the path in VARIABLE. It ends with
the process that started it. A request is a message with three descriptors, its standard streams:

    ◀── Fork            ──▶ pid
    ◀── Status          ──▶ exit status of a process that has ended
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import runpy
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.lifecycle import piped_child

MODULE = "tests.support.services.forked_pools"
VARIABLE = "HEARTH_TEST_FORKED_POOLS"
FORKED = (
    "services.gateway.dialects.preparation_process",
    "services.gateway.preparation.encoding_process",
    "services.gateway.structured.grammars.check_process",
)
LATER = ("services.gateway.dialects.dialect_table", "services.gateway.request.prepared_bodies")
Start = Callable[[Sequence[str], Mapping[str, str]], tuple[Any, int]]
MAX_BYTES = 1 << 16
ROOT = Path(__file__).parents[3]


class Fork(msgspec.Struct, tag=True):
    module: str
    environ: dict[str, str]


class Status(msgspec.Struct, tag=True):
    pid: int


# ── where a gateway runs ─────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def forked_pools() -> Iterator[None]:
    """Gateways in this process have forked pools."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(piped_child, "_popen", _forking(piped_child._popen))
        yield


def use_forked_pools() -> None:
    """For the rest of a process of a cluster."""
    if VARIABLE in os.environ:
        patch = pytest.MonkeyPatch()
        patch.setattr(piped_child, "_popen", _forking(piped_child._popen))


def server_path() -> str:
    """Returns the socket of the server, which is started first if needed."""
    with _LOCK:  # of two threads, one starts it
        return os.environ.get(VARIABLE) or _own_server()


class ForkedPool:
    """A forked process with the part of `subprocess.Popen` that a piped child uses."""

    def __init__(self, module: str, environ: Mapping[str, str]) -> None:
        theirs, stdin = os.pipe()
        stdout, ours = os.pipe()
        self.stdin, self.stdout = os.fdopen(stdin, "wb", 0), os.fdopen(stdout, "rb", 0)
        self.returncode: int | None = None
        try:
            self.pid = _ask(Fork(module, {**environ}), (theirs, ours, 2))
        finally:
            os.close(theirs)
            os.close(ours)

    def wait(self) -> int:
        """Returns the status of the process, which has ended."""
        if self.returncode is None:
            self.returncode = _ask(Status(self.pid))
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, 9)


def _forking(start: Start) -> Start:
    """Returns `start` for all but the processes of pools."""

    def forked_or_started(command: Sequence[str], environ: Mapping[str, str]) -> tuple[Any, int]:
        if [*command[:2]] == [sys.executable, "-m"] and command[2] in FORKED:
            forked = ForkedPool(command[2], environ)
            return forked, os.pidfd_open(forked.pid)
        return start(command, environ)

    return forked_or_started


def _ask(message: Fork | Status, fds: Sequence[int] = ()) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(server_path())
        socket.send_fds(connection, [msgspec.json.encode(message)], [*fds])
        return msgspec.json.decode(connection.recv(MAX_BYTES), type=int)


@cache
def _own_server() -> str:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = f"{folder}/forks"
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, path],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    _OWN.append(process)  # its input is open until this process ends
    return path


_LOCK = threading.Lock()
_OWN: list[subprocess.Popen[bytes]] = []


# ── the server ───────────────────────────────────────────────────────────────────────────────────


def main(path: str) -> None:
    for each in (*FORKED, *LATER):
        import_module(each)
    gc.collect()
    gc.freeze()  # no collection of a process writes to these pages
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        os.write(1, b"ready\n")
        while True:
            readable, _, _ = select.select([0, listener], [], [])
            if 0 in readable:
                os._exit(0)
            connection, _ = listener.accept()
            with connection:
                _answer(connection, listener)


def _answer(connection: socket.socket, listener: socket.socket) -> None:
    data, fds, _, _ = socket.recv_fds(connection, MAX_BYTES, 3)
    match msgspec.json.decode(data, type=Fork | Status):
        case Fork() as fork:
            answer = os.fork()
            if answer == 0:
                listener.close()
                connection.close()
                _become(fork, fds)
            for each in fds:
                os.close(each)
        case Status(pid):
            answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    connection.send(msgspec.json.encode(answer))


def _become(fork: Fork, fds: Sequence[int]) -> None:
    status = 1
    try:
        for target, source in enumerate(fds):
            os.dup2(source, target)
            os.close(source)
        os.environ.clear()
        os.environ.update(fork.environ)
        sys.argv = [fork.module]
        sys.modules.pop(fork.module)
        runpy.run_module(fork.module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
