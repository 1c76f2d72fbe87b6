"""Counts what ran out of a device's memory, and logs it once in a while."""

from __future__ import annotations

import math

import structlog

from shared.clock import Clock

log = structlog.get_logger(__name__)

LOG_APART_S = 30.0


class MemoryShortage:
    def __init__(self, clock: Clock) -> None:
        self.num = 0  # since the start
        self._num_logged = 0
        self._logged_at = -math.inf
        self._clock = clock

    def record(self, error: Exception, **fields: object) -> None:
        """Logs the error and `fields` unless another one was logged lately."""
        self.num += 1
        now = self._clock.now()
        if now < self._logged_at + LOG_APART_S:
            return
        log.warning(
            "out_of_memory", reason=str(error), num_since=self.num - self._num_logged, **fields
        )
        self._logged_at, self._num_logged = now, self.num
