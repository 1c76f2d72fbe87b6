"""A command with a deadline: at its end, or at the deadline, no process of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

GRACE_S = 2.0  # between the signal to end and the one that ends


def run(
    command: Sequence[str], *, deadline_s: float, log: Path, environ: Mapping[str, str], cwd: Path
) -> int | None:
    """The exit status, negative for a signal; None when the deadline came first."""
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
    """With all that it started; the group is its own."""
    with suppress(ProcessLookupError):
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
