"""A gateway's connections to Redis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from shared.clock import Clock
from shared.config import GatewayConfig, redis_tls_of
from shared.store import RedisStore, Store

SLOW_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class GatewayStores:
    """Connections to one Redis, so that slow replies do not trip the breaker of API key look-ups or
    of each other. `fast` is for the request path, `slow` for prefixes, which may be long, and
    `bulk` for replies of megabytes. `replica` is a near copy of Redis for API keys, or None.
    """

    fast: Store
    slow: Store
    bulk: Store
    replica: Store | None = None

    @classmethod
    def connect(cls, config: GatewayConfig, clock: Clock) -> Self:
        tls = redis_tls_of(config)
        slow, bulk = (
            RedisStore(config.redis_url, clock, timeout_s=SLOW_TIMEOUT_S, tls=tls) for _ in range(2)
        )
        url = config.redis_read_url
        return cls(
            RedisStore(config.redis_url, clock, tls=tls),
            slow,
            bulk,
            RedisStore(url, clock, tls=tls) if url else None,
        )

    @classmethod
    def of_one(cls, store: Store) -> Self:
        return cls(store, store, store)

    async def close(self) -> None:
        for each in (self.fast, self.slow, self.bulk, self.replica):
            if each is not None:
                await each.close()
