"""Child processes: each has a log file and, on Linux, is killed when this process dies."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from services.local.processes.log_files import ERRORS, last_line, level_of, open_log
from shared.background import start_awaited
from shared.errors import ConfigError
from shared.lifecycle.child_process import send_signal

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    process_id: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]  # the full environment, which contains secrets; argv never does
    listens_on: tuple[str, int] | None = None  # if set, it is up once this port accepts connections
    umask: int | None = None  # None: this process's
    inherited: tuple[int, ...] = ()  # descriptors
    start_order: int = 0  # equal numbers start and stop together; stopped in reverse


class Child(msgspec.Struct, frozen=True):
    spec: ProcessSpec
    process: asyncio.subprocess.Process
    log_path: Path

    def end(self, when: str = "") -> str:
        """Returns how the process has ended: `was killed (SIGKILL)`, or `ended (exit status 2: …)`
        with the last line of its log, if that is an error. `when` follows the verb.
        """
        status = self.process.returncode or 0
        line = last_line(self.log_path)
        level = level_of(line)
        is_killed = status == -signal.SIGKILL
        is_cause = level in ERRORS or (level is None and not is_killed)
        line = line.removeprefix(f"{self.spec.process_id}: ").removeprefix("hearth: ")
        how = ": ".join(filter(None, (ending(status), line if is_cause else "")))
        return f"{'was killed' if is_killed else 'ended'}{when} ({how})"


async def start_child(spec: ProcessSpec, directory: Path, logs: Path) -> Child:
    """Starts a child. Must be called on the main thread: the kernel kills the child when the
    calling thread ends.

    The child runs in a new session, so that Ctrl-C in the terminal reaches only the parent, which
    stops its children in order. Raises ConfigError if the child cannot be started.
    """
    log_path = logs / f"{spec.process_id}.log"
    log = open_log(log_path)
    try:
        process = await asyncio.create_subprocess_exec(
            *spec.argv,
            env=dict(spec.environ),
            cwd=directory,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=spec.inherited,
            preexec_fn=_prepare(spec.umask, os.getpid()),
        )
    except OSError as error:
        raise ConfigError(f"cannot start {spec.argv[0]}: {error.strerror}") from None
    finally:
        os.close(log)
    return Child(spec, process, log_path)


async def stop_children(children: Iterable[Child], *, grace_s: float) -> None:
    """Sends SIGTERM, then SIGKILL to children that still run after `grace_s`."""
    living = [child for child in children if child.process.returncode is None]
    if not living:
        return
    for child in living:
        send_signal(child.process, signal.SIGTERM)
    waits = [start_awaited(child.process.wait()) for child in living]
    _, late = await asyncio.wait(waits, timeout=grace_s)
    if late:
        kill_children(living)
        await asyncio.wait(late)


def kill_children(children: Iterable[Child]) -> None:
    for child in children:
        send_signal(child.process, signal.SIGKILL)


def ending(returncode: int) -> str:
    """Describes a return code: `exit status 2`, `SIGKILL`."""
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def _prepare(umask: int | None, parent_pid: int) -> Callable[[], None]:
    """Returns a function for a child to call between fork and exec. uvloop, under which load tests
    start clusters, has no argument for a child's umask.
    """
    die = die_with_parent(parent_pid)

    def between_fork_and_exec() -> None:
        die()
        if umask is not None:
            os.umask(umask)

    return between_fork_and_exec


def die_with_parent(parent_pid: int) -> Callable[[], None]:
    """Returns a function for a child to call between fork and exec, or after a fork alone."""

    def between_fork_and_exec() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent_pid:  # the parent died before the call
                os._exit(1)

    return between_fork_and_exec
