"""Signals and priorities of child processes that an event loop waits for."""

from __future__ import annotations

import contextlib
import os
import signal
from asyncio.subprocess import Process


def send_signal(process: Process, number: signal.Signals) -> None:
    """Like `process.send_signal`, but does not poll the child. That poll would reap an ended child
    before the event loop does, and the loop would report exit status 255.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # the child has just ended
            os.kill(process.pid, number)


def lower_priority(native_id: int, niceness: int) -> None:
    """`native_id`: of a thread, or of a process that has just started; `niceness`: beyond that of
    the calling thread. Threads that it starts later inherit it. Nothing if it has ended.
    """
    with contextlib.suppress(ProcessLookupError):
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, native_id, own + niceness)
