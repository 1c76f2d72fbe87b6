"""Signals for child processes that an event loop waits for."""

from __future__ import annotations

import contextlib
import os
import signal
from asyncio.subprocess import Process


def send_signal(process: Process, number: signal.Signals) -> None:
    """As `process.send_signal`, which first asks the system whether the child has ended, and so
    takes its exit status from under the loop that waits for it: then it would be 255.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it ended in this moment
            os.kill(process.pid, number)
