"""Stops the local cluster of another process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from services.local.state import holder_of, is_running, newest_cluster
from shared.errors import ConfigError

POLL_S = 0.05


def stop_cluster(parent: Path, *, timeout_s: float) -> str:
    """Sends SIGTERM to the `hearth up` of the newest cluster, and returns its description once it
    has ended. Raises ConfigError if none runs, or if it still runs after `timeout_s`.
    """
    directory, runs = newest_cluster(parent)
    if not runs:
        raise ConfigError("no local cluster is running here")
    pid = holder_of(directory)
    what = f"the cluster of `hearth up` (process {pid})"
    _terminate(pid, directory)
    deadline = time.monotonic() + timeout_s
    while is_running(directory):
        if time.monotonic() >= deadline:
            raise ConfigError(f"{what} still runs after {timeout_s:g} s: `hearth logs` shows why")
        time.sleep(POLL_S)
    return what


def _terminate(pid: int, directory: Path) -> None:
    """Sends SIGTERM to this process only: the descriptor stays that of the process that holds the
    lock, whoever gets its number later.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # it has just ended
    try:
        if is_running(directory):
            signal.pidfd_send_signal(process, signal.SIGTERM)
    except ProcessLookupError:
        pass
    finally:
        os.close(process)
