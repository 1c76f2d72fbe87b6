"""New API keys for tenants."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

from shared.clock import MonotonicClock
from shared.store import RedisStore, Store

StoreApiKey = Callable[[Store, str, str], Awaitable[None]]  # store, key, tenant id


def new_api_key() -> str:
    return f"hearth-{secrets.token_urlsafe(24)}"


async def save_api_key(
    store_api_key: StoreApiKey, redis_url: str, api_key: str, tenant_id: str
) -> None:
    """Raises StoreUnavailable if Redis does not answer."""
    store = RedisStore(redis_url, MonotonicClock(), timeout_s=2.0)
    try:
        await store_api_key(store, api_key, tenant_id)
    finally:
        await store.close()
