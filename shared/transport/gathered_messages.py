"""Hands over frequent messages in groups.

A message that arrives alone finds the processor's caches full of other things, and its handling
takes several times as long as that of one among others. 200 workers send 800 heartbeats a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Handle = Callable[[str, bytes], None]  # subject, data


class GatheredMessages:
    """A message after a pause of `period_s` is handed over at once, those of the next `period_s`
    together at its end, in the order of arrival.
    """

    def __init__(self, handle: Handle, period_s: float) -> None:
        self._handle = handle
        self._period_s = period_s
        self._waiting: list[tuple[str, bytes]] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, subject: str, data: bytes) -> None:
        self._waiting.append((subject, data))
        if self._timer is None:
            self._hand_over()

    def close(self) -> None:
        """Drops the messages that wait."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _hand_over(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._end_period)
        waiting, self._waiting = self._waiting, []
        for subject, data in waiting:
            self._handle(subject, data)

    def _end_period(self) -> None:
        self._timer = None
        if self._waiting:
            self._hand_over()
