"""A process that has imported what a CPU worker needs, and becomes one by fork on request.

Python, torch and numba take about two seconds to import, and their pages are shared by all workers
that are forked. This process has one thread, never computes and never touches a CUDA device: there
is nothing that a fork could break. Lines on standard input and output:

    ◀── WorkerSpec          ──▶ {"pid": …}, then once it has ended {"pid": …, "status": …}
                            ──▶ or {"pid": 0, "failure": …}

It ends with its host: on the end of its input, or by the kernel. Its workers end with it.

    python -m services.host.workers.worker_template NUM_THREADS
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path

import msgspec

from services.host.workers.worker_process import decode_spec, run_worker, set_thread_environ
from services.local.processes.child_processes import die_with_parent
from services.local.processes.log_files import open_log

STDIN, STDOUT = 0, 1
MODULES = (
    "services.worker.worker",
    "shared.engine.token_masks.worker_grammars",
    "shared.engine.executors.load",
    "shared.engine.executors.cpu_executor",
    "shared.lifecycle.process",
)


class TemplateReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A report of a template about `pid`. If `pid` is 0, the template is ready, or with a `failure`
    it cannot fork.

    `status` is as in `os.waitstatus_to_exitcode`; None means that the process has
    just been started.
    """

    pid: int
    status: int | None = None
    failure: str = ""


def import_worker() -> None:
    for module in MODULES:
        import_module(module)
    import_kernels = import_module("shared.engine.executors.loading.cpu_kernels").import_kernels
    import_kernels()


def main() -> None:
    set_thread_environ(int(sys.argv[1]))
    import_worker()
    gc.collect()
    gc.freeze()  # no collection of a worker writes to these pages
    wakeup = _wake_on_child_end()
    _report(TemplateReport(0))
    received = b""
    while True:
        readable, _, _ = select.select([STDIN, wakeup], [], [])
        if wakeup in readable:
            os.read(wakeup, 4096)
            _report_ends()
        if STDIN in readable:
            data = os.read(STDIN, 1 << 16)
            if not data:
                os._exit(0)
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                _fork(line)


def _wake_on_child_end() -> int:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return reader


def _fork(line: bytes) -> None:
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:  # no process or no memory is left: the other workers go on
        _report(TemplateReport(0, failure=error.strerror or "fork fails"))
        return
    if pid:
        _report(TemplateReport(pid))
        return
    status = 1
    try:
        status = _become_worker(line, parent)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _become_worker(line: bytes, parent: int) -> int:
    die_with_parent(parent)()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    spec = decode_spec(line)
    log = open_log(Path(spec.log_path))
    os.dup2(os.open(os.devnull, os.O_RDONLY), STDIN)
    os.dup2(log, STDOUT)
    os.dup2(log, 2)
    return run_worker(spec.config)


def _report_ends() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _report(TemplateReport(pid, os.waitstatus_to_exitcode(status)))


def _report(report: TemplateReport) -> None:
    os.write(STDOUT, msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    main()
