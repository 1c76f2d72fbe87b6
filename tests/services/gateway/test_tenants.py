from __future__ import annotations

import asyncio

import pytest

from services.gateway.tenants import REFRESH_S, TenantRecord, Tenants, api_key_record, store_api_key
from shared.clock import MonotonicClock
from shared.errors import AuthenticationFailed, DependencyUnavailable
from shared.store import RedisStore
from tests.servers import RedisServer


class HandClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    async def sleep(self, delay_s: float) -> None:
        self.time += delay_s
        await asyncio.sleep(0)


@pytest.fixture
async def store(redis_server: RedisServer) -> RedisStore:
    return RedisStore(redis_server.url, MonotonicClock(), timeout_s=2.0)


async def test_key_to_tenant(store: RedisStore) -> None:
    await store_api_key(store, "k1", "acme")
    record = await Tenants(store, HandClock()).tenant_of("Bearer k1")
    assert record.tenant_id == "acme"
    assert b"k1" not in (await store.get(api_key_record("k1")) or b"")


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic k1", "k1", "Bearer no"])
async def test_strangers(store: RedisStore, header: str | None) -> None:
    with pytest.raises(AuthenticationFailed):
        await Tenants(store, HandClock()).tenant_of(header)


async def test_revoked_key_stops_working(store: RedisStore) -> None:
    clock = HandClock()
    tenants = Tenants(store, clock)
    await store_api_key(store, "k2", "acme")
    await tenants.tenant_of("Bearer k2")
    await store.write([("DEL", api_key_record("k2"))])
    assert (await tenants.tenant_of("Bearer k2")).tenant_id == "acme"
    clock.time += REFRESH_S
    with pytest.raises(AuthenticationFailed):
        await tenants.tenant_of("Bearer k2")


async def test_without_redis_known_keys_work() -> None:
    server = RedisServer()
    clock = HandClock()
    store = RedisStore(server.url, clock)
    await store_api_key(RedisStore(server.url, clock, timeout_s=2.0), "k3", "acme")
    tenants = Tenants(store, clock)
    await tenants.tenant_of("Bearer k3")
    server.stop()
    clock.time += 60
    assert (await tenants.tenant_of("Bearer k3")).tenant_id == "acme"
    with pytest.raises(DependencyUnavailable) as caught:
        await tenants.tenant_of("Bearer k4")
    assert caught.value.retry_after_s == 1.0
    server.start()
    await store_api_key(RedisStore(server.url, clock, timeout_s=2.0), "k4", "other")
    assert (await tenants.tenant_of("Bearer k4")).tenant_id == "other"
    server.stop()


async def test_many_at_once_ask_once(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await store_api_key(store, "k5", "acme")
    asked = []
    is_answering = asyncio.Event()
    get = store.get

    async def counted(key: str) -> bytes | None:
        asked.append(key)
        await is_answering.wait()
        return await get(key)

    monkeypatch.setattr(store, "get", counted)
    tenants = Tenants(store, HandClock())
    first = asyncio.create_task(tenants.tenant_of("Bearer k5"))
    await asyncio.sleep(0)
    others = [asyncio.create_task(tenants.tenant_of("Bearer k5")) for _ in range(20)]
    await asyncio.sleep(0)
    first.cancel()  # the client that asked first may leave
    await asyncio.sleep(0)
    is_answering.set()
    records = await asyncio.gather(*others, return_exceptions=True)
    assert set(records) == {TenantRecord("acme")}
    assert len(asked) == 1
