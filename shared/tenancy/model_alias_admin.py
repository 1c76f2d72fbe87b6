"""Administration of model aliases, for the commands of `hearth model`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from shared.errors import ConfigError
from shared.store import Store
from shared.tenancy.model_alias import MAX_ALIASES, ModelAlias, aliases_of, check_model_id
from shared.tenancy.tenant import TENANTS, check_tenant_id
from shared.transport.wire_errors import UNREADABLE

# KEYS: aliases, tenants. ARGV: alias, its record, the most aliases, the tenant (empty: all).
PUT_ALIAS = """
if ARGV[4] ~= '' and redis.call('HEXISTS', KEYS[2], ARGV[4]) == 0 then return 'unknown_tenant' end
local is_new = redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0
if is_new and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then return 'full' end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 'stored'
"""
REMOVE_ALIAS = "return redis.call('HDEL', KEYS[1], ARGV[1])"


class AliasRow(msgspec.Struct, frozen=True, kw_only=True):
    """An alias. `tenant_id` is None for an alias of all tenants. `model` is None if its record is
    unreadable.
    """

    tenant_id: str | None
    alias: str
    model: str | None
    created_at: float = 0.0


class ModelAliasAdmin:
    """Changes aliases. `now` returns unix seconds. Every method raises StoreUnavailable if Redis
    does not answer, and ConfigError for a name, model or tenant that is invalid or does not exist.
    """

    def __init__(
        self, store: Store, now: Callable[[], float], *, max_aliases: int = MAX_ALIASES
    ) -> None:
        self._store = store
        self._now = now
        self._max_aliases = max_aliases

    async def put(self, alias: str, model: str, tenant_id: str | None = None) -> None:
        """Adds an alias for one tenant or, with None, for all; replaces one of the same name."""
        check_model_id(alias, "alias")
        check_model_id(model, "model")
        if alias == model:
            raise ConfigError(f"the alias {alias!r} is the model's own name, which works anyway")
        record = msgspec.json.encode(ModelAlias(model=model, created_at=self._now()))
        outcome = await self._store.evaluate(
            PUT_ALIAS,
            [_key(tenant_id), TENANTS],
            [alias, record, self._max_aliases, tenant_id or ""],
        )
        if outcome == b"unknown_tenant":
            raise _unknown(tenant_id)
        if outcome == b"full":
            raise ConfigError(
                f"{_scope(tenant_id)} may have at most {self._max_aliases} aliases: "
                "remove one with `hearth model unalias`"
            )

    async def remove(self, alias: str, tenant_id: str | None = None) -> None:
        if not await self._store.evaluate(REMOVE_ALIAS, [_key(tenant_id)], [alias]):
            raise ConfigError(
                f"{_scope(tenant_id)} has no alias {alias!r}: see `hearth model aliases`"
            )

    async def all(self) -> list[AliasRow]:
        """Returns the aliases for all tenants, then those of each tenant; sorted by name."""
        tenants = sorted(each.decode() for each in await self._store.hash_get(TENANTS))
        rows = await self._rows(None)
        for tenant_id in tenants:
            rows += await self._rows(tenant_id)
        return rows

    async def visible_to(self, tenant_id: str) -> list[AliasRow]:
        """Returns the aliases that resolve for this tenant; sorted by name."""
        if tenant_id.encode() not in await self._store.hash_get(TENANTS):
            raise _unknown(tenant_id)
        shared, own = await self._rows(None), await self._rows(tenant_id)
        visible = {row.alias: row for row in (*shared, *own)}
        return [visible[alias] for alias in sorted(visible)]

    async def model_of(self, name: str) -> str:
        """Returns the model of an alias for all tenants; of another name the name itself."""
        found = {row.alias: row.model for row in await self._rows(None)}
        return found.get(name) or name

    async def _rows(self, tenant_id: str | None) -> list[AliasRow]:
        found: Mapping[bytes, bytes] = await self._store.hash_get(_key(tenant_id))
        return [_row(tenant_id, name, data) for name, data in sorted(found.items())]


def _key(tenant_id: str | None) -> str:
    return aliases_of(None if tenant_id is None else check_tenant_id(tenant_id))


def _unknown(tenant_id: str | None) -> ConfigError:
    return ConfigError(f"tenant {tenant_id!r} does not exist: see `hearth tenant list`")


def _scope(tenant_id: str | None) -> str:
    return "the list for all tenants" if tenant_id is None else f"tenant {tenant_id!r}"


def _row(tenant_id: str | None, name: bytes, data: bytes) -> AliasRow:
    alias = name.decode(errors="replace")
    try:
        record = msgspec.json.decode(data, type=ModelAlias)
    except UNREADABLE:
        return AliasRow(tenant_id=tenant_id, alias=alias, model=None)
    return AliasRow(
        tenant_id=tenant_id, alias=alias, model=record.model, created_at=record.created_at
    )
