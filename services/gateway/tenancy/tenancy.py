"""A gateway's records and counters of tenants, over one Redis, and the tenants of other sites."""

from __future__ import annotations

from collections.abc import Callable

from services.gateway.observability.metrics.copied_tenants import CopyCounts
from services.gateway.streams.changed_regions import ChangedRegions
from services.gateway.tenancy.api_keys import ApiKeys
from services.gateway.tenancy.limits import Limits
from services.gateway.tenancy.redis_memory import RedisMemory
from services.gateway.tenancy.refusal_audit import RefusalAudit
from services.gateway.tenancy.region_changes import RegionChanges, changed_regions
from services.gateway.tenancy.region_rule import RegionRule
from services.gateway.tenancy.removed_tenants import RemovedTenants
from services.gateway.tenancy.stores import GatewayStores
from services.gateway.tenancy.usage_counter import UsageCounter
from shared.clock import Clock
from shared.config import GatewayConfig
from shared.regions.region_classes import region_classes
from shared.store import StoreUnavailable
from shared.subjects import is_at_site
from shared.tenancy.copied_tenants import CopiedTenants
from shared.tenancy.declared_classes import declare_classes
from shared.tenancy.refusals import Refusals
from shared.tenancy.residency import may_hold
from shared.tenancy.tenant import TenantRecord, tenant_of

DECLARE_S = 1.0


class Tenancy:
    """The keys, limits and usage of all tenants. `num_gateways` returns the number of gateways that
    share the limits. `writer_id` is unique per process start. `refusals` counts tenants of other
    regions.
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
        refusals: Refusals | None = None,
    ) -> None:
        classes = region_classes(config.region_classes)
        self._rule = RegionRule(config.region, classes, refusals, is_linked=bool(config.site))
        self.stores = stores
        self.copied = CopiedTenants(
            config.site, lambda record: may_hold(record, config.region, classes)
        )
        self.api_keys = ApiKeys(
            stores.fast,
            clock,
            replica=stores.replica,
            copied=self.copied,
            stale_s=config.stale_s,
            rule=self._rule,
        )
        self.limits = Limits(stores.fast, clock, num_gateways)
        self._clock, self._classes = clock, classes
        self.usage = UsageCounter(stores.fast, clock, writer_id=writer_id, now=wall_clock)
        self.removed = RemovedTenants(stores.slow, clock, wall_clock)
        self.refusal_audit = RefusalAudit(stores.slow, clock, config.process_id)
        self.redis_memory = RedisMemory(
            stores.slow,
            clock,
            max_response_bytes=config.max_stored_response_bytes,
            max_prefix_bytes=config.max_stored_prefix_bytes,
        )

    async def watch_regions(
        self, *follow: Callable[[ChangedRegions], None], forget: Callable[[str], None]
    ) -> None:
        """Calls each of `follow` for each tenant whose regions change, from then on, and `forget`
        for one whose data may no longer be here.
        """

        def on_change(tenant_id: str, record: TenantRecord | None) -> None:
            self.api_keys.forget(tenant_id, record)
            changed = changed_regions(tenant_id, record, self._rule)
            for each in follow:
                each(changed)
            if changed.error is not None:
                forget(tenant_id)

        await RegionChanges(self.stores.slow, self._clock, on_change).run()

    async def record_of(self, tenant_id: str) -> TenantRecord | None:
        """Returns the record of a tenant of this site, or of another site that is served here; None
        for an unknown one. Raises ConfigError and StoreUnavailable.
        """
        if is_at_site(tenant_id):
            copied = self.copied.named(tenant_id)
            return None if copied is None else copied.tenant
        return await tenant_of(self.stores.slow, tenant_id)

    async def declare_regions(self) -> None:
        """Writes the region classes for the commands of operators, once Redis takes them."""
        while True:
            try:
                await declare_classes(self.stores.slow, self._classes)
                return
            except StoreUnavailable:
                await self._clock.sleep(DECLARE_S)

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
