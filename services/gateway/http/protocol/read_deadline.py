"""A deadline for what a client sends, which a busy event loop does not cut short.

    set ──delay_s──▶ due ──the time that the loop was late, at least LOOK_S──▶ on_end
     ▲                │
     └──── start ─────┴── stop ──▶ unset

A loop that was busy, or whose process was stopped, runs timers that are due although it has not
read yet what clients sent in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_S = 0.01  # long enough for one poll of the sockets, which precedes the timers


class ReadDeadline:
    """Calls `on_end` once the client has had `delay_s` seconds and the loop has read what arrived
    in that time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    def start(self, delay_s: float, on_end: Callable[[], None]) -> None:
        """Replaces an earlier deadline."""
        self.stop()
        due_at = self._loop.time() + delay_s

        def look_again() -> None:
            late_s = min(self._loop.time() - due_at, delay_s)
            self._handle = self._loop.call_later(max(late_s, LOOK_S), on_end)

        self._handle = self._loop.call_later(delay_s, look_again)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
