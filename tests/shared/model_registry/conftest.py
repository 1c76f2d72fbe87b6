"""The model registry on a real Redis, and on the simulation's, which must behave alike."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shared.clock import MonotonicClock
from shared.model_registry.admin import RegistryAdmin
from shared.store import RedisStore, Store
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S
from tests.support.world.store import MemoryStore

NOW = 1_700_000_000.5


@pytest.fixture(params=["redis", "memory"])
async def store(request: pytest.FixtureRequest, redis_server: RedisServer) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
        return
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=LIMIT_S)
    await store.write([("FLUSHALL",)])
    yield store
    await store.close()


@pytest.fixture
def admin(store: Store) -> RegistryAdmin:
    return RegistryAdmin(store, lambda: NOW)
