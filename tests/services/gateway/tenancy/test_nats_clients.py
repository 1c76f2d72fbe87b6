"""NATS clients of a tenant: their records in Redis, and what gateways read there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.gateway.tenancy.api_keys import REFRESH_S, ApiKeys
from services.gateway.tenancy.errors import UnknownTenant
from shared.clock import MonotonicClock
from shared.errors import AuthenticationFailed, ConfigError
from shared.store import RedisStore
from shared.tenancy.tenant import TENANTS
from shared.tenancy.tenant_admin import TenantAdmin, key_id_of
from tests.services.gateway.tenancy.test_api_keys import NOW, ManualClock, look_up
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=LIMIT_S)
    await store.write([("FLUSHALL",)])
    yield store
    await store.close()


@pytest.fixture
async def admin(store: RedisStore) -> TenantAdmin:
    admin = TenantAdmin(store, lambda: NOW)
    await admin.add("acme", {"requests_per_min": 7}, "k1")
    await admin.add("other", {}, "k2")
    return admin


async def test_client_has_the_limits_of_its_tenant(store: RedisStore, admin: TenantAdmin) -> None:
    clock = ManualClock()
    keys = ApiKeys(store, clock)
    await admin.add_client("acme", "billing")
    await admin.add_client("acme", "billing")  # a second try after a failure
    assert (await keys.tenant_of_client("billing")).requests_per_min == 7
    await admin.change("acme", {"requests_per_min": 8})
    clock.time += REFRESH_S
    assert (await keys.tenant_of_client("billing")).requests_per_min == 8


async def test_revoked_client_is_rejected_within_a_second(
    store: RedisStore, admin: TenantAdmin
) -> None:
    clock = ManualClock()
    keys = ApiKeys(store, clock)
    await admin.add_client("acme", "billing")
    await keys.tenant_of_client("billing")
    assert await admin.revoke("acme", "billing") == ["billing"]
    clock.time += REFRESH_S
    with pytest.raises(AuthenticationFailed, match="NATS client has been revoked"):
        await keys.tenant_of_client("billing")
    assert (await look_up(keys, "k1")).tenant_id == "acme"
    with pytest.raises(ConfigError, match="revoked: choose another name"):
        await admin.add_client("acme", "billing")


async def test_client_without_a_record_is_rejected(store: RedisStore, admin: TenantAdmin) -> None:
    keys = ApiKeys(store, ManualClock())
    for client_id in ("nobody", "acme", key_id_of("k1"), ""):
        with pytest.raises(AuthenticationFailed, match="NATS client is not valid"):
            await keys.tenant_of_client(client_id)
    with pytest.raises(AuthenticationFailed, match="API key is not valid"):
        await look_up(keys, "client:billing")
    await admin.add_client("acme", "billing")
    await store.write([("HDEL", TENANTS, "acme")])
    with pytest.raises(UnknownTenant, match="the NATS client's tenant 'acme'"):
        await keys.tenant_of_client("billing")


async def test_rotation_of_keys_leaves_clients_valid(store: RedisStore, admin: TenantAdmin) -> None:
    await admin.add_client("acme", "billing")
    assert await admin.rotate("acme", "k3", keep_s=0, key_id=None) == [key_id_of("k1")]
    assert (await ApiKeys(store, ManualClock()).tenant_of_client("billing")).tenant_id == "acme"
    with pytest.raises(ConfigError, match="'billing' is a NATS client"):
        await admin.rotate("acme", "k4", keep_s=0, key_id="billing")
    assert sorted(await admin.revoke("acme", None)) == sorted(["billing", key_id_of("k3")])


async def test_client_of_another_tenant_is_not_taken_over(
    store: RedisStore, admin: TenantAdmin
) -> None:
    claims = [admin.add_client(tenant, "billing") for tenant in ("acme", "other")]
    first, second = await asyncio.gather(*claims, return_exceptions=True)
    lost = [each for each in (first, second) if each is not None]
    assert len(lost) == 1 and "belongs to another tenant" in str(lost[0])
    owner = (await ApiKeys(store, ManualClock()).tenant_of_client("billing")).tenant_id
    assert owner == ("acme" if first is None else "other")
    with pytest.raises(ConfigError, match="tenant 'nobody' does not exist"):
        await admin.add_client("nobody", "else")


async def test_client_is_not_named_like_an_api_key(admin: TenantAdmin) -> None:
    """The key could then no longer be listed or revoked."""
    (key,) = await admin.keys("acme")
    with pytest.raises(ConfigError, match="is the id of an API key"):
        await admin.add_client("acme", key.key_id)
    assert [each.key_id for each in await admin.keys("acme")] == [key.key_id]


async def test_cached_client_is_valid_without_redis() -> None:
    server, clock = RedisServer(), ManualClock()
    admin = TenantAdmin(RedisStore(server.url, clock, timeout_s=LIMIT_S), lambda: NOW)
    await admin.add("acme", {}, "k1")
    await admin.add_client("acme", "billing")
    keys = ApiKeys(RedisStore(server.url, clock), clock)
    await keys.tenant_of_client("billing")
    server.stop()
    clock.time += 60
    assert (await keys.tenant_of_client("billing")).tenant_id == "acme"
