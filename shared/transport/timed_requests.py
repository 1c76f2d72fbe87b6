"""Requests whose timeouts follow the measured round trip to their peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shared.clock import Clock
from shared.errors import DependencyUnavailable, HearthError
from shared.messages import Failure, Message
from shared.transport.bus import Bus
from shared.transport.round_trips import UNKNOWN_S, RoundTrips

M = TypeVar("M", bound=Message)


class TimedRequests:
    def __init__(self, bus: Bus, clock: Clock) -> None:
        self.round_trips = RoundTrips()
        self._bus = bus
        self._clock = clock

    async def request(
        self,
        peer: str,
        subject: str,
        message: Message,
        reply_type: type[M],
        *,
        base_s: float,
        unknown_s: float = UNKNOWN_S,
        is_use: bool = True,
        on_late: Callable[[M | Failure | None], None] | None = None,
    ) -> M:
        """Sends a request and returns the reply, with a timeout of `base_s` plus the estimated
        round trip to `peer`.

        `peer` is a process id, or the subject of a queue group. A late reply also updates the
        estimate. For `is_use`, see `RoundTrips.wait_s`.
        """
        sent_at = self._clock.now()

        def measure() -> None:
            now = self._clock.now()
            self.round_trips.record(peer, now - sent_at, now)

        def take_late(reply: M | Failure | None) -> None:
            if reply is not None:
                measure()
            if on_late is not None:
                on_late(reply)

        timeout_s = self.round_trips.wait_s(
            peer, base_s, sent_at, unknown_s=unknown_s, is_use=is_use
        )
        try:
            reply = await self._bus.request(
                subject, message, reply_type, timeout_s=timeout_s, on_late=take_late
            )
        except DependencyUnavailable:  # no reply
            raise
        except HearthError:  # the reply of a peer that rejects the request
            measure()
            raise
        measure()
        return reply
