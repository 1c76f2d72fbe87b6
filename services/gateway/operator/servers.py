"""The states of Redis and NATS as a gateway sees them, and since when.

Redis is asked once a WATCH_S, so that a loss is seen without requests.
"""

from __future__ import annotations

from services.gateway.tenancy.tenancy import Tenancy
from shared.clock import Clock
from shared.fleet.read_fleet import ServerView
from shared.transport.bus import Bus

WATCH_S = 1.0


class WatchedServer:
    """The state of one server since its last change."""

    def __init__(self, now: float) -> None:
        self._state = "ok"
        self._num_losses = 0
        self._since = now

    def observe(self, state: str, num_losses: int, now: float) -> None:
        """Records the state. A higher number of losses shows one that ended between two calls."""
        if state != self._state or num_losses != self._num_losses:
            self._state, self._num_losses, self._since = state, num_losses, now

    def view(self, now: float) -> ServerView:
        return ServerView(state=self._state, for_s=round(max(0.0, now - self._since), 1))


class Servers:
    """Redis and NATS. `tenancy` asks Redis, `bus` is the connection to NATS."""

    def __init__(self, tenancy: Tenancy, bus: Bus, clock: Clock) -> None:
        self._tenancy = tenancy
        self._bus = bus
        self._clock = clock
        now = clock.now()
        self._redis, self._nats = WatchedServer(now), WatchedServer(now)

    async def watch(self) -> None:
        while True:
            await self.poll()
            await self._clock.sleep(WATCH_S)

    async def poll(self) -> None:
        await self._tenancy.api_keys.poll_redis()
        now = self._clock.now()
        self._redis.observe(self._tenancy.redis_state, 0, now)
        is_connected = self._bus.is_connected
        self._nats.observe("ok" if is_connected else "unavailable", self._bus.num_reconnects, now)

    @property
    def redis(self) -> ServerView:
        return self._redis.view(self._clock.now())

    @property
    def nats(self) -> ServerView:
        return self._nats.view(self._clock.now())
