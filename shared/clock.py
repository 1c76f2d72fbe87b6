"""The time seam. Logic asks a `Clock`; only `MonotonicClock` asks the machine.

Durations travel on the wire, never timestamps: two hosts share no clock.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    async def sleep(self, delay_s: float) -> None: ...


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
