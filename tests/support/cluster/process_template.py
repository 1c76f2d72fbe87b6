"""Monitored processes by fork: a template has imported what services need, once for all tests.

    template().start(arguments, environ, log_path)    # a ForkedProcess

An interpreter and its imports take a second of CPU time for each process of a cluster, and four
with an engine. The template has one thread, opens nothing and computes nothing. It ends with the
process that started it, at the end of its input, and its processes end with it. Lines on standard
input and output:

    ◀── Launch            ──▶ pid
    ◀── Poll              ──▶ exit status as in subprocess.Popen; null: it runs
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

import msgspec

from services.host.workers.worker_template import import_worker
from services.scheduler import cost_kernel
from tests.support.cluster.service_processes import ROOT, process_environ
from tests.support.services.forked_pools import VARIABLE, server_path

MODULE = "tests.support.cluster.process_template"
FORKED_RANKS = "tests.support.engine.forked_ranks"
RANK = "rank"  # the first argument of a process that becomes a rank of a group
POLL_S = 0.01
MODULES = (
    "services.__main__",
    "services.gateway.service",
    "services.kv_index.service",
    "services.scheduler.service",
    "tests.support.cluster.monitored_process",
    "tests.support.cluster.timing",
)


class Launch(msgspec.Struct, tag=True):
    arguments: list[str]
    environ: dict[str, str]
    log_path: str


class Poll(msgspec.Struct, tag=True):
    pid: int


# ── in the tests ─────────────────────────────────────────────────────────────────────────────────


class ProcessTemplate:
    """A process that imports its modules once and forks the processes that tests start.

    `module` is the template's module, which calls `serve`. `environ` is added to this process's.
    """

    def __init__(self, module: str, environ: Mapping[str, str]) -> None:
        one_thread = {"OPENBLAS_NUM_THREADS": "1"}  # a pool of threads does not fork
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            env=process_environ({**one_thread, **environ}),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._lock = threading.Lock()

    def start(
        self, arguments: Sequence[str], environ: Mapping[str, str], log_path: Path
    ) -> ForkedProcess:
        """Forks a process with `environ` as its whole environment. Its log is appended to
        `log_path`.
        """
        if [*arguments[1:2]] == ["gateway"]:
            environ = {**environ, VARIABLE: server_path()}
        pid = self._request(Launch([*arguments], {**environ}, str(log_path)))
        assert pid is not None
        return ForkedProcess(self, pid)

    def poll(self, pid: int) -> int | None:
        return self._request(Poll(pid))

    def _request(self, message: Launch | Poll) -> int | None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with self._lock:
            stdin.write(msgspec.json.encode(message) + b"\n")
            stdin.flush()
            return msgspec.json.decode(stdout.readline(), type=int | None)


@cache
def template() -> ProcessTemplate:
    """Returns the template of this process."""
    return ProcessTemplate(MODULE, {})


class ForkedProcess:
    """A forked process with the part of `subprocess.Popen`'s interface that tests use."""

    def __init__(self, template: ProcessTemplate, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._template = template
        self._lock = threading.Lock()  # the template has a status to report only once

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                self.returncode = self._template.poll(self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired."""
        began_at = time.monotonic()
        while (status := self.poll()) is None:
            if timeout is not None and time.monotonic() - began_at > timeout:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# ── in the template ──────────────────────────────────────────────────────────────────────────────


def main() -> None:
    for module in MODULES:
        import_module(module)
    import_worker()
    import_module(FORKED_RANKS).import_rank()
    dict(import_module("services.__main__")._command().commands)  # which each would build
    serve(_become)


def serve(become: Callable[[Sequence[str]], None]) -> None:
    """Forks a process for each request, which calls `become` with its arguments."""
    gc.collect()
    gc.freeze()  # no collection of a process writes to these pages
    for line in iter(sys.stdin.buffer.readline, b""):
        match msgspec.json.decode(line, type=Launch | Poll):
            case Launch() as launch:
                answer: int | None = _fork(launch, become)
            case Poll(pid):
                ended, status = os.waitpid(pid, os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if ended else None
        os.write(1, msgspec.json.encode(answer) + b"\n")


def _fork(launch: Launch, become: Callable[[Sequence[str]], None]) -> int:
    if "scheduler" in launch.arguments and cost_kernel.is_cached():
        cost_kernel.load()  # once: it takes a scheduler a second
    pid = os.fork()
    if pid:
        return pid
    try:
        _enter(launch)
        become(launch.arguments)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _enter(launch: Launch) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(launch.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    os.environ.clear()
    os.environ.update(launch.environ)


def _become(arguments: Sequence[str]) -> None:
    if arguments[0] == RANK:
        import_module(FORKED_RANKS).become_rank(arguments[1:])
    else:
        _become_monitored(arguments)


def _become_monitored(arguments: Sequence[str]) -> None:
    sys.argv = ["monitored_process", *arguments]
    import_module("tests.support.cluster.monitored_process").main()


if __name__ == "__main__":
    main()
