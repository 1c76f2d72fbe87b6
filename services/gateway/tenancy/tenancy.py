"""What a gateway knows and counts of tenants, over one Redis."""

from __future__ import annotations

from collections.abc import Callable

from services.gateway.tenancy.api_keys import ApiKeys
from services.gateway.tenancy.limits import Limits
from services.gateway.tenancy.redis_memory import RedisMemory
from services.gateway.tenancy.usage_counter import UsageCounter
from shared.clock import Clock
from shared.config import GatewayConfig
from shared.store import Store


class Tenancy:
    """`slow_store`: outside the request path. `replica`: a near one, for API keys."""

    def __init__(
        self,
        config: GatewayConfig,
        store: Store,
        slow_store: Store,
        clock: Clock,
        wall_clock: Callable[[], float],
        *,
        replica: Store | None,
        num_gateways: Callable[[], int],
        writer_id: str,
    ) -> None:
        self.api_keys = ApiKeys(store, clock, replica=replica)
        self.limits = Limits(store, clock, num_gateways)
        self.usage = UsageCounter(store, clock, writer_id=writer_id, now=wall_clock)
        self.redis_memory = RedisMemory(
            slow_store,
            clock,
            max_response_bytes=config.max_stored_response_bytes,
            max_prefix_bytes=config.max_stored_prefix_bytes,
        )
