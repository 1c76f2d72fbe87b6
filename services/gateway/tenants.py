"""API keys and the tenants behind them.

Redis holds `hearth:api_key:{sha256 of the key, hex}` → {tenant_id}; the key itself is stored
nowhere. A known key is looked up again after `REFRESH_S`, so a revoked one stops working within
that time. While Redis is away known keys keep working; unknown ones cannot be judged.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated

import msgspec

from shared.clock import Clock
from shared.decoding import UNREADABLE
from shared.errors import AuthenticationFailed, DependencyUnavailable
from shared.store import BREAKER_S, Store, StoreUnavailable

REFRESH_S = 1.0
SECOND_TRY_S = BREAKER_S + 0.05


class TenantRecord(msgspec.Struct, frozen=True):
    tenant_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    is_zero_retention: bool = False
    allowed_regions: tuple[str, ...] | None = None  # None: all


def api_key_record(api_key: str) -> str:
    """The Redis key under which an API key is found."""
    return f"hearth:api_key:{sha256(api_key.encode()).hexdigest()}"


async def store_api_key(store: Store, api_key: str, tenant_id: str) -> None:
    """Raises StoreUnavailable."""
    record = msgspec.json.encode(TenantRecord(tenant_id))
    await store.write([("SET", api_key_record(api_key), record)])


@dataclass(frozen=True, slots=True)
class _Known:
    record: TenantRecord
    checked_at: float


class Tenants:
    """The cache holds valid keys only, so strangers cannot fill it."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._lookups: dict[str, asyncio.Task[TenantRecord]] = {}

    async def warm_up(self) -> None:
        """Opens the connection to Redis, so that the first request does not wait for it."""
        with contextlib.suppress(StoreUnavailable):
            await self._store.get(api_key_record(""))

    async def tenant_of(self, authorization: str | None) -> TenantRecord:
        """Raises AuthenticationFailed, or DependencyUnavailable for a new key without Redis."""
        key = api_key_record(bearer_of(authorization))
        known = self._known.get(key)
        if known is not None and self._clock.now() - known.checked_at < REFRESH_S:
            return known.record
        lookup = self._lookups.get(key)
        if lookup is None:  # one question to Redis, however many requests wait for it
            lookup = asyncio.create_task(self._look_up(key))
            self._lookups[key] = lookup
            lookup.add_done_callback(lambda _: self._lookups.pop(key))
        return await asyncio.shield(lookup)

    async def _look_up(self, key: str) -> TenantRecord:
        try:
            data = await self._store.get(key)
        except StoreUnavailable:
            if key in self._known:
                return self._known[key].record
            data = await self._second_try(key)
        if data is None:
            self._known.pop(key, None)
            raise AuthenticationFailed("the API key is not valid")
        return self._remember(key, data)

    async def _second_try(self, key: str) -> bytes | None:
        """A short timeout can be our own doing, as when many requests arrive at once."""
        await self._clock.sleep(SECOND_TRY_S)
        try:
            return await self._store.get(key)
        except StoreUnavailable:
            raise DependencyUnavailable(
                "API keys cannot be checked at the moment", retry_after_s=1.0
            ) from None

    def _remember(self, key: str, data: bytes) -> TenantRecord:
        try:
            record = msgspec.json.decode(data, type=TenantRecord)
        except UNREADABLE as error:
            raise DependencyUnavailable("the record of this API key is unreadable") from error
        self._known[key] = _Known(record, self._clock.now())
        return record


def bearer_of(authorization: str | None) -> str:
    """Raises AuthenticationFailed for a header that carries none."""
    if authorization is None:
        raise AuthenticationFailed("send the API key as `Authorization: Bearer <key>`")
    scheme, _, api_key = authorization.partition(" ")
    api_key = api_key.strip()
    if scheme.lower() != "bearer" or not api_key:
        raise AuthenticationFailed("the Authorization header must be `Bearer <key>`")
    return api_key
