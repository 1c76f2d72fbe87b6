"""Captures graphs while no step runs, so that few are captured when a step needs them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

import structlog

from shared.background import Background
from shared.clock import MonotonicClock

log = structlog.get_logger(__name__)

IDLE_S = 0.5  # time without a step after which captures begin; each takes some 0.1 s


class IdleCaptures:
    """`has_next` says whether shapes are left, and `capture_next` captures one of them on the step
    thread: a step that is submitted meanwhile waits for it.
    """

    def __init__(
        self,
        has_next: Callable[[], bool],
        capture_next: Callable[[], Awaitable[None]],
        idle_s: float = IDLE_S,
    ) -> None:
        self._has_next, self._capture_next, self._idle_s = has_next, capture_next, idle_s
        self._clock = MonotonicClock()
        self._num_in_flight = 0
        self._ended_at = -math.inf  # of the last step
        self._background = Background()
        self._has_failed = False

    def begin_step(self) -> None:
        self._num_in_flight += 1

    def end_step(self) -> None:
        self._num_in_flight -= 1
        self.begin()

    def begin(self) -> None:
        """Begins to capture after `idle_s` without a step: those that wait for a woken worker come
        before captures.
        """
        self._ended_at = self._clock.now()
        if not (len(self._background) or self._has_failed) and self._has_next():
            self._background.start_item(self._run(), self._fail)

    def _fail(self, error: Exception) -> None:
        """Ends the captures alone: steps run without them."""
        log.error("idle_captures_failed", exc_info=error)
        self._has_failed = True

    async def stop(self) -> None:
        await self._background.stop()

    async def _run(self) -> None:
        while self._has_next():
            ended_at = math.inf if self._num_in_flight else self._ended_at
            left_s = ended_at + self._idle_s - self._clock.now()
            if left_s > 0:
                await asyncio.sleep(min(left_s, self._idle_s))
            else:
                await self._capture_next()
