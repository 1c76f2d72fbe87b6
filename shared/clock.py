"""The time seam. Logic reads a `Clock`; only this module reads the system's clock.

Messages carry durations, never timestamps, because two hosts share no clock.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

_IMPORTED_AT = time.monotonic()


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


def process_age_s() -> float:
    """Returns the seconds since this process was started; without Linux's /proc, since the import
    of this module.
    """
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since the boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    return time.monotonic() - _IMPORTED_AT
