"""Drains a worker on an operator's command, so that it can be stopped without a lost request.

    serving ──DrainWorker──▶ draining ──hand_over_s──▶ requests returned to their gateways
       ▲                        │                          │
       └────────is_undone───────┴──────────────────────────┘

Pushes of KV are not returned: they end by themselves within their deadlines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import structlog

from shared.background import Background, is_logged
from shared.clock import Clock
from shared.messages import DrainState, DrainWorker

log = structlog.get_logger(__name__)


class Handler(Protocol):
    """The service of a role: it runs prefills, or placements."""

    @property
    def num_unfinished(self) -> int: ...

    @property
    def num_pushes(self) -> int:
        """Unfinished work whose KV another worker waits for."""
        ...

    def hand_over(self) -> None:
        """Returns running requests to their gateways."""
        ...


class DrainedWorker:
    def __init__(self, clock: Clock, handlers: Sequence[Handler]) -> None:
        self.is_draining = False
        self._clock = clock
        self._handlers = handlers
        self._num_commands = 0
        self._background = Background()

    def drain(self, command: DrainWorker) -> DrainState:
        """Takes a command; the last one decides when requests are handed over."""
        if self.is_draining == command.is_undone:
            log.info("drain_undone" if command.is_undone else "draining")
        self.is_draining = not command.is_undone
        if command.is_undone or command.hand_over_s is not None:
            self._num_commands += 1
        if self.is_draining and command.hand_over_s is not None:
            hand_over = self._hand_over(command.hand_over_s, self._num_commands)
            self._background.start_item(hand_over, is_logged)
        num_pushes = sum(each.num_pushes for each in self._handlers)
        num_unfinished = sum(each.num_unfinished for each in self._handlers)
        return DrainState(num_running=num_unfinished - num_pushes, num_pushes=num_pushes)

    async def _hand_over(self, after_s: float, number: int) -> None:
        await self._clock.sleep(after_s)
        if self._num_commands != number:  # undone, or another time was asked for
            return
        log.info("handing_over", num_requests=sum(each.num_unfinished for each in self._handlers))
        for each in self._handlers:
            each.hand_over()
