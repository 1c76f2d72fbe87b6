"""Model aliases on the terminal: one Redis connection per command, results as a table or JSON."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rich.table import Table

from services.cli.output import plain_table, print_json, show, time_text, with_store
from shared.tenancy.model_alias_admin import AliasRow, ModelAliasAdmin

T = TypeVar("T")


def with_alias_admin(redis_url: str | None, action: Callable[[ModelAliasAdmin], Awaitable[T]]) -> T:
    """Runs a function with the aliases' admin. Raises ConfigError, or StoreUnavailable if Redis
    does not reply.
    """
    return with_store(redis_url, lambda store: action(ModelAliasAdmin(store, time.time)))


def show_aliases(rows: Sequence[AliasRow], *, is_json: bool) -> None:
    if is_json:
        print_json(rows)
    else:
        show(_table_of(rows) if rows else "no alias")


def _table_of(rows: Sequence[AliasRow]) -> Table:
    headings = ("alias", "model", "tenant", "created")
    table = plain_table(*headings)
    for row in rows:
        tenant = "all" if row.tenant_id is None else row.tenant_id
        if row.model is None:
            table.add_row(row.alias, "its record is unreadable", tenant, "", style="red")
        else:
            created = time_text(row.created_at)
            table.add_row(row.alias, row.model, tenant, created)
    return table
