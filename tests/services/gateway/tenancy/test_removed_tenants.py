"""What a gateway does when tenants are removed, or switch zero retention on."""

from __future__ import annotations

from services.gateway.tenancy.removed_tenants import REPEAT_S, RemovedTenants
from shared.clock import MonotonicClock
from shared.store import RedisStore
from shared.tenancy.deletion import kv_drops
from shared.tenancy.deletion.kv_drops import DropReason
from tests.services.gateway.tenancy.test_api_keys import NOW, ManualClock
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S


async def test_gateway_forgets_what_it_holds_of_a_tenant(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.scratch_url, MonotonicClock(), timeout_s=LIMIT_S)
    clock = ManualClock()
    await store.write([("FLUSHDB",)])
    removed = RemovedTenants(store, clock, lambda: NOW)

    async def polled() -> tuple[list[str], list[str]]:
        closed, forgotten = list[str](), list[str]()
        await removed.poll(lambda tenant, _: closed.append(tenant), forgotten.append)
        return closed, forgotten

    async def order(tenant_id: str, reason: DropReason) -> None:
        await kv_drops.order(store, tenant_id, reason, NOW)

    try:
        await order("before", "removed")
        assert await polled() == ([], []), "from before its start"
        await order("a", "zero_retention")
        await order("b", "regions")
        assert await polled() == ([], ["a"])
        assert await polled() == ([], []), "receipts that it asks for stay"
        await order("c", "removed")
        assert await polled() == (["c"], ["c"])
        assert await polled() == (["c"], ["c"]), "a request in preparation opens later"
        clock.time += REPEAT_S + 1
        assert await polled() == ([], [])
    finally:
        await store.close()
