"""A command with a deadline: when it ends or at the deadline, all its processes are ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

GRACE_S = 2.0  # time between SIGTERM and SIGKILL


def run(
    command: Sequence[str], *, deadline_s: float, log: Path, environ: Mapping[str, str], cwd: Path
) -> int | None:
    """Returns the exit status, negative for a signal; None if the deadline passed first."""
    with log.open("ab") as file:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=dict(environ),
            cwd=cwd,
            start_new_session=True,
        )
    try:
        return child.wait(max(0.0, deadline_s))
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the child and all processes that it started, as they have a process group."""
    with suppress(ProcessLookupError):
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
