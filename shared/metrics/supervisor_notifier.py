"""Reports the state of a process to the supervisor that asks for it: sd_notify(3) of systemd.

systemd names a datagram socket in NOTIFY_SOCKET, and restarts a process that is ready and then
reports no progress within WATCHDOG_USEC.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from math import inf
from time import monotonic

import structlog

from shared.messages import Heartbeat

log = structlog.get_logger(__name__)

READY, STOPPING, PROGRESS = "READY=1", "STOPPING=1", "WATCHDOG=1"
REPORTS_PER_LIMIT = 4


class Notifier:
    def __init__(self, address: str, watchdog_s: float | None = None) -> None:
        """Reports to the socket at `address`, whose names in Linux's abstract space begin with @.
        `watchdog_s` is the longest time without progress; None: nobody watches.
        """
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_s = watchdog_s

    @classmethod
    def of_environ(cls, environ: Mapping[str, str]) -> Notifier | None:
        """Returns None for a process that no supervisor asks."""
        address = environ.get("NOTIFY_SOCKET", "")
        if not address:
            return None
        limit_us, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
        is_watched = limit_us.isdigit() and pid in ("", str(os.getpid()))
        return cls(address, int(limit_us) / 1e6 if is_watched else None)

    @property
    def interval_s(self) -> float:
        """Seconds between two reports of progress; inf: nobody watches."""
        return inf if self._watchdog_s is None else self._watchdog_s / REPORTS_PER_LIMIT

    def send(self, state: str) -> None:
        """Sends a state, on the process's event loop. A supervisor that has gone, or does not read,
        gets none.
        """
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
                connection.setblocking(False)
                connection.connect(self._address)
                connection.send(state.encode())
        except OSError as error:
            log.warning("supervisor_not_notified", state=state, reason=error.strerror)

    async def report_progress(self, describe: Callable[[], Heartbeat]) -> None:
        """Reports for ever while the process gets on. It runs on the process's event loop, so that
        a frozen one reports nothing.
        """
        if self.interval_s == inf:
            return
        steps = StepWatch()
        while True:
            if steps.is_sound(describe(), monotonic()):
                self.send(PROGRESS)
            await asyncio.sleep(self.interval_s)


class TurnNotifier:
    """Reports the turns of a loop that is no event loop: ready at the first one, then progress."""

    def __init__(self, notifier: Notifier | None) -> None:
        self._notifier = notifier
        self._sent_at: float | None = None

    def __call__(self) -> None:
        if self._notifier is None:
            return
        now = monotonic()
        if self._sent_at is None:
            self._notifier.send(READY)
        elif now - self._sent_at < self._notifier.interval_s:
            return
        else:
            self._notifier.send(PROGRESS)
        self._sent_at = now


class StepWatch:
    """Decides whether the engine of a process makes steps; its counter moves while it is idle."""

    def __init__(self) -> None:
        self._step = -1
        self._moved_at = 0.0

    def is_sound(self, heartbeat: Heartbeat, now: float) -> bool:
        """Whether a step has ended within the time that the engine announced for it. A process
        without an engine is sound.
        """
        load = heartbeat.load
        if load is None:
            return True
        if load.step != self._step:
            self._step, self._moved_at = load.step, now
        return now - self._moved_at <= load.step_budget_s
