"""Reads the registry: a process has the last value that Redis had.

One script, each `POLL_S`: Redis answers with its version alone while that is unchanged. While Redis
is away, or has lost its records, the last value stays. No operation removes the version, so its
absence later means lost records, even when tenants have been added again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import msgspec
import structlog

from shared.background import failing_alone, item_error
from shared.clock import Clock
from shared.model_registry.record import MAX_MODELS, REGISTRY, REGISTRY_VERSION, RegisteredModel
from shared.store import NEW_REDIS, Store, StoreUnavailable
from shared.tenancy.tenant import GENERATION
from shared.transport.wire_errors import UNREADABLE, one_line

log = structlog.get_logger(__name__)

POLL_S = 1.0

# KEYS: the registry, its version, the generation. ARGV: the version that the caller
# has, the most models. Returns whether Redis has records (0 or 1), whether it has a version, the
# version, and, if it is another one, names and records alternately.
READ_REGISTRY = """
local has_records = math.min(1, redis.call('EXISTS', KEYS[2], KEYS[3]))
local number = redis.call('GET', KEYS[2])
local version = (redis.call('GET', KEYS[3]) or '') .. '/' .. (number or '')
if version == ARGV[1] then return {has_records, number and 1 or 0, version} end
if redis.call('HLEN', KEYS[1]) > tonumber(ARGV[2]) then error(KEYS[1] .. ' has too many models') end
return {has_records, number and 1 or 0, version, redis.call('HGETALL', KEYS[1])}
"""
_KEYS = (REGISTRY, REGISTRY_VERSION, GENERATION)


class RegistryReader:
    """Reads the registry.

    `models`, by name, are as last read; empty before. If `is_read`, Redis has answered once.
    `unreadable` has names whose record cannot be decoded; such a model keeps its last value, if it
    had one here, and the other models are not affected.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self.models: Mapping[str, RegisteredModel] = MappingProxyType({})
        self.unreadable: frozenset[str] = frozenset()
        self.is_read = False
        self._store = store
        self._clock = clock
        self._version = b""
        self._is_versioned = False  # Redis has had a version
        self._records: dict[bytes, bytes] = {}  # records as read
        self._is_away = False
        self._is_new = False  # Redis has never had a record, as far as this process knows
        self._failure = ""  # the failure that was logged last
        self._handlers: list[Callable[[], None]] = []

    def on_change(self, handler: Callable[[], None]) -> None:
        """Calls `handler` after the first read, and after each change of `models`."""
        self._handlers.append(handler)

    async def run(self) -> NoReturn:
        """Polls for ever. An unavailable Redis is logged once, until it answers again."""
        while True:
            try:
                await self.refresh()
            except StoreUnavailable as error:
                if not self._is_away:
                    level = logging.INFO if self._is_new else logging.WARNING
                    log.log(level, "catalogue_unavailable", error=error.message)
                self._is_away = True
            except BaseException as raised:  # an operator's record is unreadable, and may stay
                failure = repr(item_error(raised))
                if failure != self._failure:
                    log.exception("catalogue_not_read")
                self._failure = failure
            else:
                self._is_away, self._failure = False, ""
            await self._clock.sleep(POLL_S)

    async def refresh(self) -> None:
        """Reads the registry in one round trip. Raises StoreUnavailable, also for a Redis that is
        new, or has lost its records.
        """
        reply: list[Any] = await self._store.evaluate(
            READ_REGISTRY, _KEYS, [self._version, MAX_MODELS]
        )
        has_records, has_version, version, *changed = reply
        self._is_new = not has_records and not self.is_read
        if self._is_new:
            raise StoreUnavailable(NEW_REDIS)
        if not has_records or (self._is_versioned and not has_version):
            raise StoreUnavailable(f"Redis has lost its records: it has no {REGISTRY_VERSION}")
        self._is_versioned = bool(has_version)
        if changed:
            self._read(dict(zip(changed[0][::2], changed[0][1::2], strict=True)))
        self._version = version

    def _read(self, records: Mapping[bytes, bytes]) -> None:
        models, unreadable = {}, set()
        for key, data in sorted(records.items()):
            name = key.decode(errors="replace")
            found = self._model(key, name, data)
            if found is None:
                unreadable.add(name)
                found = self.models.get(name)
            if found is not None:
                models[name] = found
        has_changed = not self.is_read or models != self.models
        self._records = dict(records)
        self.unreadable = frozenset(unreadable)
        self.is_read = True
        if has_changed:
            self.models = MappingProxyType(models)
            for handler in self._handlers:
                with failing_alone("catalogue_not_followed"):
                    handler()

    def _model(self, key: bytes, name: str, data: bytes) -> RegisteredModel | None:
        """Decodes only what has changed; logs a new record that is unreadable."""
        is_known = self._records.get(key) == data
        if is_known:
            return None if name in self.unreadable else self.models[name]
        try:
            return model_of(name, data)
        except UNREADABLE as error:
            log.error("catalogue_model_unreadable", model=name, error=one_line(error))
            return None


def model_of(name: str, data: bytes) -> RegisteredModel:
    """Decodes the record stored under `name`. Raises one of UNREADABLE."""
    model = msgspec.json.decode(data, type=RegisteredModel)
    names = {each.name for each in model.revisions}
    if model.name != name:
        raise msgspec.ValidationError(f"its record is of {model.name!r}")
    if len(names) < len(model.revisions) or not any(each.weight > 0 for each in model.revisions):
        raise msgspec.ValidationError("its revisions have no weight, or two have one name")
    return model
