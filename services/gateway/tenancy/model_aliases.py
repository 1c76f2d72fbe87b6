"""Resolves the aliases under which a tenant may name models.

All aliases of a tenant are read in one round trip, and again after `REFRESH_S`: any number of
unknown names costs one look-up in that time, and no memory. As with API keys, a request with a
known alias waits for a look-up at most `KNOWN_KEY_WAIT_S`. While Redis is unavailable, known
aliases keep their last value, and other names cannot be checked.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import structlog

from services.gateway.tenancy.api_keys import KNOWN_KEY_WAIT_S, REFRESH_S, SECOND_TRY_S
from shared.background import start_awaited
from shared.clock import Clock
from shared.errors import DependencyUnavailable
from shared.store import Store, StoreRejected, StoreUnavailable
from shared.tenancy.model_alias import MAX_ALIASES, ModelAlias, aliases_of, is_model_id
from shared.tenancy.tenant import GENERATION, TENANTS
from shared.transport.wire_errors import UNREADABLE

log = structlog.get_logger(__name__)

MAX_TENANTS = 1024  # the cache drops the least recently used

# KEYS: a tenant's aliases, those of all tenants, the generation, all tenants. ARGV: the maximum
# number of aliases of a hash. Returns the names and records of each hash as msgpack, so that one
# string is parsed instead of hundreds, and 1 if Redis has records, else 0, as for API keys.
LOOK_UP_ALIASES = """
local function packed(key)
  if redis.call('HLEN', key) > tonumber(ARGV[1]) then error(key .. ' has too many aliases') end
  return cmsgpack.pack(redis.call('HGETALL', key))
end
local has_records = math.min(1, redis.call('EXISTS', KEYS[3], KEYS[4]))
return {packed(KEYS[1]), packed(KEYS[2]), has_records}
"""

Models = Mapping[str, str | None]  # alias → model, or None if its record is unreadable


@dataclass(frozen=True, slots=True)
class _Hash:
    packed: bytes
    models: Models


_EMPTY = _Hash(b"", {})


@dataclass(frozen=True, slots=True)
class _TenantAliases:
    """The aliases that a tenant sees. `is_current` is false if Redis did not answer the last
    look-up, `is_readable` if it answered with an error.
    """

    own: _Hash
    shared: _Hash
    checked_at: float
    is_current: bool = True
    is_readable: bool = True

    def __contains__(self, alias: str) -> bool:
        return alias in self.own.models or alias in self.shared.models

    def __getitem__(self, alias: str) -> str | None:
        models = self.own.models if alias in self.own.models else self.shared.models
        return models[alias]


class ModelAliases:
    """The aliases of all tenants. `is_native(tenant, name)` returns whether a tenant sees a model
    of this name. Permission to use a model is not checked here: the caller checks the name that
    `resolve` returns.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        is_native: Callable[[str, str], bool],
        max_tenants: int = MAX_TENANTS,
    ) -> None:
        self._store = store
        self._clock = clock
        self._is_native = is_native
        self._max_tenants = max_tenants
        self._known: OrderedDict[str, _TenantAliases] = OrderedDict()
        self._shared = _EMPTY
        self._lookups: dict[str, asyncio.Task[_TenantAliases]] = {}

    async def resolve(self, tenant_id: str, name: str) -> str | None:
        """Returns the model of a name: a native name itself, without a look-up, the model of an
        alias that the tenant sees, or None for other names. Raises DependencyUnavailable if it
        cannot be checked.
        """
        if self._is_native(tenant_id, name):
            return name
        if not is_model_id(name):
            return None
        aliases = await self._aliases(tenant_id, name)
        if name in aliases:
            model = aliases[name]
            if model is None:
                raise DependencyUnavailable(f"the record of the alias {name!r} is unreadable")
            return model
        if not aliases.is_current:
            raise _not_checked()
        return None

    async def of_tenant(self, tenant_id: str) -> dict[str, str]:
        """Returns the models by alias that the tenant sees, sorted: at most 2 * MAX_ALIASES. Raises
        DependencyUnavailable if they have never been read.
        """
        aliases = await self._aliases(tenant_id, None)
        models = {**aliases.shared.models, **aliases.own.models}
        return {
            alias: model
            for alias, model in sorted(models.items())
            if model is not None and not self._is_native(tenant_id, alias)
        }

    async def names_of(self, tenant_id: str, model: str) -> list[str]:
        """Returns the model's own name, then its aliases that the tenant sees. Raises as
        `of_tenant` does.
        """
        aliases = await self.of_tenant(tenant_id)
        return [model, *(alias for alias, named in aliases.items() if named == model)]

    async def _aliases(self, tenant_id: str, name: str | None) -> _TenantAliases:
        """Returns the tenant's aliases, to resolve `name`, or all names if it is None. Raises
        DependencyUnavailable.
        """
        known = self._known.get(tenant_id)
        if known is None or self._clock.now() - known.checked_at >= REFRESH_S:
            known = await self._refreshed(tenant_id, name, known)
        else:
            self._known.move_to_end(tenant_id)
        if not known.is_readable:
            raise DependencyUnavailable("the model aliases of this tenant are unreadable")
        return known

    async def _refreshed(
        self, tenant_id: str, name: str | None, known: _TenantAliases | None
    ) -> _TenantAliases:
        lookup = self._lookups.get(tenant_id)
        if lookup is None:  # concurrent requests share one look-up
            lookup = start_awaited(self._look_up(tenant_id))
            self._lookups[tenant_id] = lookup
            lookup.add_done_callback(lambda _: self._lookups.pop(tenant_id))
        if known is not None and (name is None or name in known):
            await asyncio.wait({lookup}, timeout=KNOWN_KEY_WAIT_S)
            if not lookup.done():
                return known
        return await asyncio.shield(lookup)

    async def _look_up(self, tenant_id: str) -> _TenantAliases:
        try:
            own, shared = await self._read(tenant_id)
        except StoreRejected as error:
            log.error("model_aliases_unreadable", tenant_id=tenant_id, error=error.message)
            found = _TenantAliases(_EMPTY, _EMPTY, self._clock.now(), is_readable=False)
        except StoreUnavailable:
            known = self._known.get(tenant_id)
            if known is None:
                raise _not_checked() from None
            return replace(known, is_current=False)
        else:
            found = self._decoded(tenant_id, own, shared)
        self._known[tenant_id] = found
        self._known.move_to_end(tenant_id)
        if len(self._known) > self._max_tenants:
            self._known.popitem(last=False)
        return found

    async def _read(self, tenant_id: str) -> tuple[bytes, bytes]:
        """Reads the aliases. Raises StoreUnavailable. An unknown tenant waits for a second try: a
        burst of requests at this gateway can also cause a short timeout.
        """
        try:
            return await self._request(tenant_id)
        except StoreRejected:
            raise
        except StoreUnavailable:
            if tenant_id in self._known:
                raise
        await self._clock.sleep(SECOND_TRY_S)
        return await self._request(tenant_id)

    async def _request(self, tenant_id: str) -> tuple[bytes, bytes]:
        """Reads the records. Raises StoreUnavailable, also for a Redis that has lost them."""
        keys = [aliases_of(tenant_id), aliases_of(None), GENERATION, TENANTS]
        reply: list[Any] = await self._store.evaluate(LOOK_UP_ALIASES, keys, [MAX_ALIASES])
        own, shared, has_records = reply
        if not has_records:
            raise StoreUnavailable(f"Redis is empty: it has no {GENERATION}")
        return own, shared

    def _decoded(self, tenant_id: str, own: bytes, shared: bytes) -> _TenantAliases:
        """Decodes only what has changed. All tenants share the decoded aliases of all tenants."""
        known = self._known.get(tenant_id)
        if shared != self._shared.packed:
            self._shared = _Hash(shared, _models(shared))
        if known is not None and own == known.own.packed:
            own_hash = known.own
        else:
            own_hash = _Hash(own, _models(own))
        return _TenantAliases(own_hash, self._shared, self._clock.now())


def _models(packed: bytes) -> Models:
    """Decodes each record by itself: an unreadable one affects only its own alias."""
    parts = msgspec.msgpack.decode(packed, type=list[msgspec.Raw])
    models: dict[str, str | None] = {}
    for name, data in zip(parts[::2], parts[1::2], strict=True):
        try:
            alias = msgspec.msgpack.decode(name, type=str)
        except UNREADABLE:
            continue  # no request can name it
        models[alias] = _model(alias, data)
    return models


def _model(alias: str, data: msgspec.Raw) -> str | None:
    try:
        record = msgspec.msgpack.decode(data, type=str)
        return msgspec.json.decode(record, type=ModelAlias).model
    except UNREADABLE as error:
        log.error("model_alias_unreadable", alias=alias, error=str(error))
        return None


def _not_checked() -> DependencyUnavailable:
    return DependencyUnavailable(
        "the model's name cannot be checked at the moment", retry_after_s=1.0
    )
