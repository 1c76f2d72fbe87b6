from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from shared.clock import MonotonicClock
from shared.store import RedisStore
from shared.tenancy.model_alias_admin import ModelAliasAdmin
from tests.services.gateway.conftest import Cluster
from tests.support.waiting import LIMIT_S

ALIASES = {
    "@cf/meta/llama-3.1-8b-instruct": "tiny",
    "@cf/other/model": "served-elsewhere",
}


@pytest_asyncio.fixture(loop_scope="session")
async def alias(cluster: Cluster) -> AsyncIterator[str]:
    """An alias of the gateway's model for all tenants, beside one of another model."""
    store = RedisStore(cluster.gateway._config.redis_url, MonotonicClock(), timeout_s=LIMIT_S)
    admin = ModelAliasAdmin(store, lambda: 0.0)
    for name, model in ALIASES.items():
        await admin.put(name, model)
    known = cluster.gateway._models.aliases._known
    known.clear()
    yield next(iter(ALIASES))
    for name in ALIASES:
        await admin.remove(name)
    await store.close()
    known.clear()
