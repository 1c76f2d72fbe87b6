"""The model registry on the terminal: what operators have set, and what hosts do with it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from rich.table import Table

from services.cli.fleet.host_tables import failures_of, short_digest, table_of_models
from services.cli.models.live_states import live_models
from services.cli.options import ALL, UNLIMITED
from services.cli.output import plain_table, print_json, show, table_console, time_text, with_store
from shared.fleet.host_view import ModelView
from shared.model_registry.admin import RegistryAdmin
from shared.model_registry.record import RegisteredModel, RegisteredRevision
from shared.model_registry.revisions import share_of
from shared.store import Store
from shared.tenancy.model_alias_admin import AliasRow, ModelAliasAdmin

COLUMNS = (
    *("model", "revision", "digest", "share", "source", "aliases", "tenants"),
    *("context", "weights", "KV", "standby", "priority", "pinned"),
)


@dataclass(frozen=True, slots=True)
class RegistryView:
    models: Mapping[str, RegisteredModel | None]  # None if the record is unreadable
    aliases: Sequence[AliasRow]
    live: Sequence[ModelView]

    def aliases_of(self, name: str) -> list[AliasRow]:
        return [each for each in self.aliases if each.model == name]

    def live_of(self, model: RegisteredModel, revision: RegisteredRevision) -> list[ModelView]:
        key = (model.name, revision.name, revision.digest)
        return [each for each in self.live if each.is_of(*key)]


class RevisionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A revision. `share` is that of new requests, 0 to 1. `promotion` is pending until a host has
    loaded it.
    """

    name: str
    digest: str
    source: str
    share: float
    promotion: str
    added_at: float
    states: list[ModelView]


class ModelListing(msgspec.Struct, frozen=True, kw_only=True):
    """A model and its revisions. `is_readable` is False for a record that cannot be decoded: only
    its name is known.
    """

    name: str
    is_readable: bool = True
    revisions: list[RevisionRow] = []
    aliases: list[AliasRow] = []
    tenants: tuple[str, ...] | None = None
    max_context_tokens: int | None = None
    weights: str = "auto"
    kv_dtype: str = "auto"
    num_standby: int = 0
    priority: int = 0
    is_pinned: bool = False
    created_at: float = 0.0


def show_models(redis_url: str | None, nats_url: str | None, *, is_json: bool) -> None:
    registry = _read(redis_url, nats_url)
    if is_json:
        print_json([_row(registry, name) for name in registry.models])
    else:
        show(table_of_registry(registry) if registry.models else "no model in the catalogue")


def show_model(redis_url: str | None, nats_url: str | None, name: str, *, is_json: bool) -> None:
    """Prints a model. Raises ConfigError for an unknown one."""
    registry = _read(redis_url, nats_url, name)
    row = _row(registry, name)
    if is_json:
        print_json(row)
        return
    live = [each for revision in row.revisions for each in revision.states]
    show(_table_of_settings(row), "", _table_of_revisions(row))
    if live:
        show("", table_of_models(live, table_console().width), *failures_of(live))


def _read(redis_url: str | None, nats_url: str | None, name: str | None = None) -> RegistryView:
    """Reads the registry, or only the model `name`, which must be there and readable."""

    async def read(store: Store) -> tuple[Mapping[str, RegisteredModel | None], Sequence[AliasRow]]:
        admin = RegistryAdmin(store, time.time)
        models = await admin.all() if name is None else {name: await admin.one(name)}
        return models, await ModelAliasAdmin(store, time.time).all()

    models, aliases = with_store(redis_url, read)
    return RegistryView(models, aliases, live_models(redis_url, nats_url) if models else ())


def _row(registry: RegistryView, name: str) -> ModelListing:
    model = registry.models[name]
    if model is None:
        return ModelListing(name=name, is_readable=False)
    return ModelListing(
        name=name,
        revisions=[_revision_row(registry, model, each) for each in model.revisions],
        aliases=registry.aliases_of(name),
        tenants=model.tenants,
        max_context_tokens=model.max_context_tokens,
        weights=model.weights,
        kv_dtype=model.kv_dtype,
        num_standby=model.num_standby,
        priority=model.priority,
        is_pinned=model.is_pinned,
        created_at=model.created_at,
    )


def _revision_row(
    registry: RegistryView, model: RegisteredModel, revision: RegisteredRevision
) -> RevisionRow:
    return RevisionRow(
        name=revision.name,
        digest=revision.digest,
        source=revision.source,
        share=share_of(model, revision),
        promotion=revision.promotion,
        added_at=revision.added_at,
        states=registry.live_of(model, revision),
    )


# ── tables ───────────────────────────────────────────────────────────────────────────────────────


def table_of_registry(registry: RegistryView) -> Table:
    """Returns a row for each revision; the model's settings in the first one."""
    columns = (*COLUMNS, "state") if registry.live else COLUMNS
    table = plain_table(*columns)
    for name in registry.models:
        row = _row(registry, name)
        if not row.is_readable:
            table.add_row(name, "its record is unreadable", style="red")
        settings = _settings(row)
        for revision in row.revisions:
            states = [_states(revision)] if registry.live else []
            table.add_row(name, *_revision_cells(revision), *settings, *states)
            settings = [""] * len(settings)
    return table


def _table_of_settings(row: ModelListing) -> Table:
    table = plain_table("model", row.name)
    for heading, value in zip(COLUMNS[5:], _settings(row), strict=True):
        table.add_row(heading, value)
    table.add_row("created", time_text(row.created_at))
    return table


def _table_of_revisions(row: ModelListing) -> Table:
    table = plain_table(*COLUMNS[1:5], "added")
    for each in row.revisions:
        table.add_row(*_revision_cells(each), time_text(each.added_at))
    return table


def _revision_cells(row: RevisionRow) -> list[str]:
    share = "promoted once loaded" if row.promotion else f"{100 * row.share:.3g} %"
    return [row.name, short_digest(row.digest) or "-", share, row.source]


def _settings(row: ModelListing) -> list[str]:
    context = row.max_context_tokens
    return [
        ", ".join(_alias(each) for each in row.aliases) or "-",
        ALL if row.tenants is None else ", ".join(row.tenants) or "none",
        UNLIMITED if context is None else f"{context:,}",
        row.weights,
        row.kv_dtype,
        str(row.num_standby),
        str(row.priority),
        "yes" if row.is_pinned else "no",
    ]


def _alias(row: AliasRow) -> str:
    return row.alias if row.tenant_id is None else f"{row.alias} ({row.tenant_id})"


def _states(row: RevisionRow) -> str:
    """Formats states as `hot on host-1, standby on host-2 and host-3`, or - if no host has it."""
    by_state: dict[str, list[str]] = {}
    for each in row.states:
        by_state.setdefault(each.state, []).append(each.host_id)
    return ", ".join(f"{state} on {' and '.join(ids)}" for state, ids in by_state.items()) or "-"
