"""New API keys for tenants."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

from shared.clock import MonotonicClock
from shared.config import url_problems
from shared.errors import ConfigError
from shared.store import RedisStore, Store

StoreApiKey = Callable[[Store, str, str], Awaitable[None]]  # store, key, tenant id


def new_api_key() -> str:
    return f"hearth-{secrets.token_urlsafe(24)}"


def create_api_key(store_api_key: StoreApiKey, redis_url: str, tenant_id: str) -> str:
    """Raises ConfigError, or StoreUnavailable if Redis does not answer."""
    problems = list(url_problems("redis_url", redis_url, schemes=("redis", "rediss", "unix")))
    if problems:
        raise ConfigError("; ".join(problems))
    api_key = new_api_key()
    asyncio.run(save_api_key(store_api_key, redis_url, api_key, tenant_id))
    return api_key


async def save_api_key(
    store_api_key: StoreApiKey, redis_url: str, api_key: str, tenant_id: str
) -> None:
    store = RedisStore(redis_url, MonotonicClock(), timeout_s=2.0)
    try:
        await store_api_key(store, api_key, tenant_id)
    finally:
        await store.close()
