"""The time seam. Logic reads a `Clock`; only `MonotonicClock` reads the system's clock.

Messages carry durations, never timestamps, because two hosts share no clock.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Returns the seconds since an arbitrary start; never decreases."""
        ...

    async def sleep(self, delay_s: float) -> None: ...


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
