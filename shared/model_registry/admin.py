"""Administration of the model registry, for the commands of `hearth model` and for hosts.

The states of a name and of its revisions are in `revisions.py`. Here each change is read, computed
and stored only if the record is still the one that was read, else computed again: two operators
cannot overwrite each other's changes. It increments the version in the same step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from shared.errors import ConfigError
from shared.model_registry.reader import model_of
from shared.model_registry.record import (
    MAX_MODELS,
    REGISTRY,
    REGISTRY_VERSION,
    RegisteredModel,
    RegisteredRevision,
)
from shared.model_registry.revisions import (
    next_revision_name,
    promoted,
    revision_of,
    with_digest,
    with_revision,
    with_share,
    without_revision,
)
from shared.store import Store
from shared.tenancy.model_alias import check_model_id
from shared.tenancy.tenant import TENANTS, check_tenant_id
from shared.transport.wire_errors import UNREADABLE, one_line

MAX_SWAPS = 16
SETTINGS = (
    *("tenants", "max_context_tokens", "weights", "kv_dtype"),
    *("num_standby", "priority", "is_pinned"),
)
_REVISION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

# KEYS: the registry, its version. ARGV: a name, its record as read (empty: none), its new record
# (empty: none), the most models, the time. The version begins at the time: after a loss of all
# records it is never again one that a reader has seen.
SWAP_MODEL = """
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 'changed' end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  local is_full = redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[4])
  if ARGV[2] == '' and is_full then return 'full' end
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
redis.call('SETNX', KEYS[2], ARGV[5])
redis.call('INCRBY', KEYS[2], 1)
return 'stored'
"""

Change = Callable[[RegisteredModel], RegisteredModel]


class RegistryAdmin:
    """Changes the registry. `now` returns unix seconds. Every method raises StoreUnavailable if
    Redis does not answer, and ConfigError for a name or value that is invalid, refused or does not
    exist.
    """

    def __init__(
        self, store: Store, now: Callable[[], float], *, max_models: int = MAX_MODELS
    ) -> None:
        self._store = store
        self._now = now
        self._max_models = max_models

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    async def all(self) -> dict[str, RegisteredModel | None]:
        """Returns models by name, sorted; None for an unreadable record."""
        found = await self._store.hash_get(REGISTRY)
        return {
            key.decode(errors="replace"): _readable(key.decode(errors="replace"), data)
            for key, data in sorted(found.items())
        }

    async def one(self, name: str) -> RegisteredModel:
        return (await self._read(name))[0]

    # ── changes ──────────────────────────────────────────────────────────────────────────────────

    async def add(
        self,
        name: str,
        source: str,
        *,
        revision: str | None = None,
        canary: float | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> RegisteredModel:
        """Adds the model, or to a known name a further revision, staged or with `canary`
        percent of new requests.

        `revision` is its name (default: r1, r2, …). `settings` are fields of the model among
        SETTINGS; others stay as they are.
        """
        check_model_id(name, "model")
        if revision is not None:
            check_revision_name(revision)
        changes = await self._checked(settings or {})
        addition = RegisteredRevision(name=revision or "r1", source=source, added_at=self._now())

        def extended(model: RegisteredModel) -> RegisteredModel:
            added_name = revision or next_revision_name(model)
            added = msgspec.structs.replace(addition, name=added_name)
            model = _with_settings(with_revision(model, added), changes)
            return model if canary is None else with_share(model, added_name, canary)

        def created() -> RegisteredModel:
            if canary is not None:
                raise ConfigError(
                    f"a canary needs a revision that takes the other requests, but the model "
                    f"{name!r} does not exist yet"
                )
            model = RegisteredModel(name=name, revisions=(addition,), created_at=self._now())
            return _with_settings(model, changes)

        return await self._change(name, extended, created)

    async def remove(self, name: str, revision: str | None = None) -> None:
        """Removes one revision, or the model, also one whose record is unreadable."""
        if revision is not None:
            await self._change(name, lambda model: without_revision(model, revision))
            return
        for _ in range(MAX_SWAPS):
            if await self._swap(name, await self._data(name), b""):
                return
        raise _contended(name)

    async def promote(self, name: str, revision: str, *, keep: bool = False) -> RegisteredModel:
        """Moves all new requests to the revision, as soon as a host has loaded it once.

        The revisions that it replaces are removed, or with `keep` stay without weight.
        """
        return await self._change(name, lambda model: promoted(model, revision, keep=keep))

    async def set_share(self, name: str, revision: str, percent: float) -> RegisteredModel:
        """Gives the revision `percent` of new requests."""
        return await self._change(name, lambda model: with_share(model, revision, percent))

    async def pin(self, name: str) -> RegisteredModel:
        return await self.set_fields(name, {"is_pinned": True})

    async def unpin(self, name: str) -> RegisteredModel:
        return await self.set_fields(name, {"is_pinned": False})

    async def set_fields(self, name: str, settings: Mapping[str, Any]) -> RegisteredModel:
        """Changes the given fields among SETTINGS."""
        changes = await self._checked(settings)
        return await self._change(name, lambda model: _with_settings(model, changes))

    async def record_digest(
        self, name: str, revision: str, digest: str, *, source: str | None = None
    ) -> str:
        """Stores the digest if the revision has none, and returns the stored one.

        With `source` it does so only if the revision still has this source, as another one of that
        name may have been added since.
        """
        if not digest:
            raise ConfigError(f"the digest of {name!r}, revision {revision!r}, is empty")

        def recorded(model: RegisteredModel) -> RegisteredModel:
            found = revision_of(model, revision)
            if source is not None and found.source != source:
                raise ConfigError(
                    f"revision {revision!r} of {name!r} is now {found.source!r}, not {source!r}"
                )
            return with_digest(model, revision, digest)

        return revision_of(await self._change(name, recorded), revision).digest

    # ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _change(
        self, name: str, change: Change, create: Callable[[], RegisteredModel] | None = None
    ) -> RegisteredModel:
        for _ in range(MAX_SWAPS):
            found = await self._found(name)
            if found is None:
                if create is None:
                    raise _unknown(name)
                changed, before = create(), b""
            else:
                changed, before = change(found[0]), found[1]
                if changed == found[0]:
                    return changed
            if await self._swap(name, before, _encoded(changed)):
                return changed
        raise _contended(name)

    async def _found(self, name: str) -> tuple[RegisteredModel, bytes] | None:
        """Returns the model and its record. Raises ConfigError for one that is unreadable."""
        data = (await self._store.hash_get(REGISTRY)).get(name.encode(errors="replace"))
        if data is None:
            return None
        try:
            return model_of(name, data), data
        except UNREADABLE as error:
            raise ConfigError(
                f"the record of the model {name!r} is unreadable ({one_line(error)}): "
                f"remove it with `hearth model remove {name}`"
            ) from error

    async def _read(self, name: str) -> tuple[RegisteredModel, bytes]:
        found = await self._found(name)
        if found is None:
            raise _unknown(name)
        return found

    async def _data(self, name: str) -> bytes:
        data = (await self._store.hash_get(REGISTRY)).get(name.encode(errors="replace"))
        if data is None:
            raise _unknown(name)
        return data

    async def _swap(self, name: str, before: bytes, after: bytes) -> bool:
        """Replaces a record. Returns False if it is no longer `before`. Empty bytes stand for no
        record.
        """
        outcome = await self._store.evaluate(
            SWAP_MODEL,
            [REGISTRY, REGISTRY_VERSION],
            [name, before, after, self._max_models, int(self._now())],
        )
        if outcome == b"full":
            raise ConfigError(
                f"the catalogue has {self._max_models} models, which is the most: "
                "remove one with `hearth model remove`"
            )
        return bool(outcome == b"stored")

    async def _checked(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        unknown = sorted(set(settings) - set(SETTINGS))
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is no setting of a model: {', '.join(SETTINGS)}")
        await self._check_tenants(settings.get("tenants") or ())
        return settings

    async def _check_tenants(self, tenants: Iterable[str]) -> None:
        known = await self._store.hash_get(TENANTS) if tenants else {}
        for tenant_id in tenants:
            if check_tenant_id(tenant_id).encode() not in known:
                raise ConfigError(f"tenant {tenant_id!r} does not exist: see `hearth tenant list`")


def check_revision_name(name: str) -> str:
    """Returns a valid name unchanged. Raises ConfigError."""
    if not _REVISION_NAME.fullmatch(name):
        raise ConfigError(
            f"invalid revision {name[:64]!r}: a name has 1 to 64 letters, digits, '.', '_' or '-', "
            "and does not begin with a sign"
        )
    return name


def _readable(name: str, data: bytes) -> RegisteredModel | None:
    try:
        return model_of(name, data)
    except UNREADABLE:
        return None


def _with_settings(model: RegisteredModel, changes: Mapping[str, Any]) -> RegisteredModel:
    """Raises ConfigError for an invalid value."""
    for name, value in changes.items():
        fields = {each: getattr(model, each) for each in model.__struct_fields__}
        try:
            model = msgspec.convert({**fields, name: value}, RegisteredModel)
        except msgspec.ValidationError as error:
            problem = str(error).partition(" - at ")[0]
            raise ConfigError(f"invalid {name} {value!r} of {model.name!r}: {problem}") from error
    return model


def _encoded(model: RegisteredModel) -> bytes:
    """Raises ConfigError for a record that no reader could decode."""
    data = msgspec.json.encode(model)
    try:
        model_of(model.name, data)
    except UNREADABLE as error:
        raise ConfigError(f"invalid model {model.name!r}: {one_line(error)}") from error
    return data


def _unknown(name: str) -> ConfigError:
    return ConfigError(f"the catalogue has no model {name!r}: see `hearth model list`")


def _contended(name: str) -> ConfigError:
    return ConfigError(f"the model {name!r} was modified concurrently; try again")
