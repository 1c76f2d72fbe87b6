"""A gateway's records and counters of tenants, over one Redis, and the tenants of other sites."""

from __future__ import annotations

from collections.abc import Callable

from services.gateway.observability.metrics.copied_tenants import CopyCounts
from services.gateway.tenancy.api_keys import ApiKeys
from services.gateway.tenancy.limits import Limits
from services.gateway.tenancy.redis_memory import RedisMemory
from services.gateway.tenancy.stores import GatewayStores
from services.gateway.tenancy.usage_counter import UsageCounter
from shared.clock import Clock
from shared.config import GatewayConfig
from shared.tenancy.copied_tenants import CopiedTenants


class Tenancy:
    """The keys, limits and usage of all tenants. `num_gateways` returns the number of gateways that
    share the limits. `writer_id` is unique per process start.
    """

    def __init__(
        self,
        config: GatewayConfig,
        stores: GatewayStores,
        clock: Clock,
        wall_clock: Callable[[], float],
        *,
        num_gateways: Callable[[], int],
        writer_id: str,
    ) -> None:
        self.stores = stores
        self.copied = CopiedTenants(config.site)
        self.api_keys = ApiKeys(
            stores.fast,
            clock,
            replica=stores.replica,
            copied=self.copied,
            stale_s=config.stale_s,
        )
        self.limits = Limits(stores.fast, clock, num_gateways)
        self.usage = UsageCounter(stores.fast, clock, writer_id=writer_id, now=wall_clock)
        self.redis_memory = RedisMemory(
            stores.slow,
            clock,
            max_response_bytes=config.max_stored_response_bytes,
            max_prefix_bytes=config.max_stored_prefix_bytes,
        )

    def copy_counts(self, now: float) -> CopyCounts:
        """Returns what is held of other sites; `now` is a time of the gateway's clock."""
        held = self.copied.confirmations()
        tenants = {home: (len(each), now - min(each)) for home, each in held.items() if each}
        return CopyCounts(tenants, self.copied.num_rejected)

    @property
    def redis_state(self) -> str:
        """The state of Redis: `ok`, or the reason why requests cannot be admitted."""
        found = self.api_keys.redis_state
        rejects = found == "ok" and self.stores.fast.load().rejects_writes
        return "rejects writes" if rejects else found
