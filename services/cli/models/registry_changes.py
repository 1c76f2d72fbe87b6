"""Changes of the model registry on the terminal: one Redis connection per command."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from services.cli.models.model_options import checked_source
from services.cli.output import with_store
from shared.errors import ConfigError
from shared.model_registry.admin import RegistryAdmin
from shared.model_registry.record import RegisteredModel
from shared.model_registry.revisions import revision_of
from shared.store import Store
from shared.tenancy.model_alias import check_model_id
from shared.tenancy.model_alias_admin import ModelAliasAdmin

T = TypeVar("T")


def with_registry(redis_url: str | None, action: Callable[[RegistryAdmin], Awaitable[T]]) -> T:
    """Runs a function with the registry's admin. Raises ConfigError, or StoreUnavailable if Redis
    does not reply.
    """
    return with_store(redis_url, lambda store: action(RegistryAdmin(store, time.time)))


def add_model(
    redis_url: str | None,
    name: str,
    source: str,
    revision: str | None,
    canary: float | None,
    *,
    settings: Mapping[str, Any],
    aliases: Sequence[str],
) -> None:
    """Checks everything, adds the model, then its aliases."""
    source, note = checked_source(source)
    for each in aliases:
        if check_model_id(each, "alias") == name:
            raise ConfigError(f"the alias {each!r} is the model's own name, which works anyway")

    async def add(store: Store) -> RegisteredModel:
        model = await RegistryAdmin(store, time.time).add(
            name, source, revision=revision, canary=canary, settings=settings
        )
        alias_admin = ModelAliasAdmin(store, time.time)
        for tenant_id in [None] if model.tenants is None else model.tenants:
            for each in aliases:
                await alias_admin.put(each, name, tenant_id)
        return model

    model = with_store(redis_url, add)
    added = model.revisions[-1].name
    print(added)
    if note:
        _note(note)
    if len(model.revisions) > 1 and canary is None:
        _note(f"{added} serves nothing yet: `hearth model promote {name} {added}`")


def change_settings(redis_url: str | None, name: str, settings: Mapping[str, Any]) -> None:
    if not settings:
        raise ConfigError("no setting is given: see `hearth model set --help`")
    with_registry(redis_url, lambda admin: admin.set_fields(name, settings))


def set_pinned(redis_url: str | None, name: str, is_pinned: bool) -> None:
    with_registry(redis_url, lambda it: it.pin(name) if is_pinned else it.unpin(name))


def remove_model(redis_url: str | None, name: str, revision: str | None) -> None:
    """Removes a model and its aliases."""

    async def remove(store: Store) -> None:
        await RegistryAdmin(store, time.time).remove(name, revision)
        if revision is None:
            await _remove_aliases(ModelAliasAdmin(store, time.time), name)

    with_store(redis_url, remove)


async def _remove_aliases(admin: ModelAliasAdmin, model: str) -> None:
    for row in await admin.all():
        if row.model == model:
            await admin.remove(row.alias, row.tenant_id)


def promote_revision(
    redis_url: str | None, name: str, revision: str, *, keep: bool, canary: float | None
) -> None:
    if canary is not None:
        if keep:
            raise ConfigError("--keep is for a complete promotion: --canary removes no revision")
        with_registry(redis_url, lambda it: it.set_share(name, revision, canary))
        return
    model = with_registry(redis_url, lambda it: it.promote(name, revision, keep=keep))
    if revision_of(model, revision).promotion:
        _note(f"{revision} takes over once a host has loaded it")


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)
