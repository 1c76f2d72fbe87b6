"""API keys and limits with a Redis that is far away: a relay delays both directions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from services.gateway.tenancy.api_keys import KNOWN_KEY_WAIT_S, REFRESH_S, ApiKeys
from services.gateway.tenancy.limits import Limits
from services.gateway.tenancy.request_cost import RequestCost
from shared.clock import MonotonicClock
from shared.errors import AuthenticationFailed
from shared.store import (
    BREAKER_S,
    STORE_TIMEOUT_S,
    RedisStore,
    StoreUnavailable,
)
from shared.tenancy.tenant_admin import TenantAdmin
from tests.support.relay import LOCALHOST, SlowRelay
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S, until

ONE_WAY_S = 0.04
MAX_S = 1.0  # that a call waits: the relay of a busy machine is late, too


class OffsetClock(MonotonicClock):
    """Real time, and a little more."""

    offset_s = 0.0

    def now(self) -> float:
        return super().now() + self.offset_s


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.store.MAX_STORE_TIMEOUT_S", MAX_S)


@pytest.fixture
def clock() -> OffsetClock:
    return OffsetClock()


@pytest.fixture
async def admin(redis_server: RedisServer) -> AsyncIterator[TenantAdmin]:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=LIMIT_S)
    await store.write([("FLUSHALL",)])
    yield TenantAdmin(store, time.time)
    await store.close()


@pytest.fixture
def relay(redis_server: RedisServer) -> Iterator[SlowRelay]:
    with SlowRelay(lambda: (LOCALHOST, redis_server.port), latency_s=ONE_WAY_S) as relay:
        yield relay


@pytest.fixture
async def distant(relay: SlowRelay, clock: OffsetClock) -> AsyncIterator[RedisStore]:
    store = RedisStore(f"redis://127.0.0.1:{relay.port}/0", clock)
    yield store
    await store.close()


async def test_unknown_keys_and_limits_are_decided_by_a_distant_redis(
    distant: RedisStore, admin: TenantAdmin, clock: OffsetClock
) -> None:
    await admin.add("acme", {"requests_per_min": 2}, "k0")
    for number in range(1, 6):
        await admin.add_key("acme", f"k{number}")
    keys, limits = ApiKeys(distant, clock), Limits(distant, clock)
    await keys.warm_up()
    # as many new connections as requests at once
    records = await asyncio.gather(*(keys.tenant_of(f"Bearer k{n}") for n in range(6)))
    assert {record.tenant_id for record in records} == {"acme"}
    with pytest.raises(AuthenticationFailed):
        await keys.tenant_of("Bearer unknown")
    lease = await limits.admit(records[0], "lease", RequestCost(5, 5))
    assert lease.is_charged
    assert STORE_TIMEOUT_S + 2 * ONE_WAY_S < distant.wait_s <= MAX_S


async def test_known_key_does_not_wait_for_a_distant_redis(
    distant: RedisStore, admin: TenantAdmin, relay: SlowRelay, clock: OffsetClock
) -> None:
    await admin.add("acme", {}, "k1")
    keys = ApiKeys(distant, clock)
    await keys.tenant_of("Bearer k1")
    await admin.revoke("acme", None)
    relay.latency_s = 0.15
    clock.offset_s += REFRESH_S
    assert 2 * relay.latency_s > KNOWN_KEY_WAIT_S
    assert (await keys.tenant_of("Bearer k1")).tenant_id == "acme"  # as cached
    with pytest.raises(AuthenticationFailed, match="revoked"):
        while True:
            await keys.tenant_of("Bearer k1")


async def test_call_that_is_answered_late_lengthens_the_wait(
    distant: RedisStore, relay: SlowRelay, clock: OffsetClock
) -> None:
    """As after a failover to a Redis at another site."""
    relay.latency_s = 0.0
    for _ in range(40):
        await distant.get("key")
    relay.latency_s = 0.6 * MAX_S
    with pytest.raises(StoreUnavailable, match="no reply within"):
        await distant.get("key")
    await until(lambda: distant.wait_s >= MAX_S)
    relay.latency_s = 0.4 * MAX_S
    clock.offset_s += BREAKER_S
    assert await distant.get("key") is None


async def test_near_replica_answers_for_keys_that_it_has(
    distant: RedisStore, admin: TenantAdmin, clock: OffsetClock
) -> None:
    replica_server = RedisServer()
    near = RedisStore(replica_server.url, clock)
    copy = RedisStore(replica_server.url, clock, timeout_s=LIMIT_S)
    keys = ApiKeys(distant, clock, replica=near)
    try:
        await TenantAdmin(copy, time.time).add("acme", {}, "copied")
        await admin.add("acme", {}, "not-copied-yet")
        for key in ("copied", "not-copied-yet"):
            assert (await keys.tenant_of(f"Bearer {key}")).tenant_id == "acme"
        with pytest.raises(AuthenticationFailed):
            await keys.tenant_of("Bearer unknown")
        replica_server.stop()
        await admin.add_key("acme", "later")
        assert (await keys.tenant_of("Bearer later")).tenant_id == "acme"
    finally:
        await near.close()
        await copy.close()
        replica_server.stop()
