"""Publishes, removes and lists public prefixes: records in Redis."""

from __future__ import annotations

import re
import sys
import time
from typing import Any, Literal

import msgspec

from services.cli.output import plain_table, table_console, with_store
from shared.block_hash import PUBLIC_TENANT_ID
from shared.errors import ConfigError
from shared.store import Store
from shared.tenancy.model_alias import check_model_id
from shared.tenancy.model_alias_admin import ModelAliasAdmin
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import (
    MAX_PER_TENANT,
    NAME_PATTERN,
    Entry,
    PinnedPrefix,
    TooManyPrefixes,
)
from shared.transport.wire_errors import UNREADABLE


class PrefixMessage(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant"]
    content: str


def publish_prefix(
    redis_url: str | None,
    name: str,
    model: str,
    text: str,
    *,
    is_json: bool,
    max_prefixes: int = MAX_PER_TENANT,
) -> None:
    """Publishes a prefix. `model`: its name, or an alias for all tenants. Raises ConfigError for
    one that gateways would reject, StoreUnavailable.
    """
    if not re.match(NAME_PATTERN, name):
        raise ConfigError(
            f"{name!r} is not a valid prefix name: use at most 64 letters, digits, . _ or -, "
            "starting with a letter or digit"
        )
    if not text.strip():
        raise ConfigError("the prefix is empty")
    check_model_id(model, "model")
    messages = _messages(text) if is_json else [{"role": "system", "content": text}]

    async def save(store: Store) -> None:
        now = time.time()
        prefix = PinnedPrefix(
            name=name,
            tenant_id=PUBLIC_TENANT_ID,
            model=await ModelAliasAdmin(store, time.time).model_of(model),
            messages=messages,
            created_at=int(now),
        )
        try:
            await pinned_prefix.save(store, prefix, now, max_prefixes=max_prefixes)
        except TooManyPrefixes as error:
            raise ConfigError(f"the public prefix is not saved: {error.message}") from error

    with_store(redis_url, save)


def remove_prefix(redis_url: str | None, name: str) -> None:
    """Removes a prefix. Raises ConfigError if it does not exist, StoreUnavailable."""

    async def delete(store: Store) -> None:
        if name not in await pinned_prefix.entries(store, PUBLIC_TENANT_ID):
            raise ConfigError(f"there is no public prefix {name!r}")
        await pinned_prefix.delete(store, PUBLIC_TENANT_ID, name)

    with_store(redis_url, delete)


def show_prefixes(redis_url: str | None, *, is_json: bool) -> None:
    """Prints the public prefixes. Raises ConfigError, StoreUnavailable."""
    entries = with_store(redis_url, lambda store: pinned_prefix.entries(store, PUBLIC_TENANT_ID))
    if is_json:
        rows = [{"name": name, **_row(entry)} for name, entry in entries.items()]
        sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")
        return
    table = plain_table("prefix", "model", "tokens")
    for name, entry in entries.items():
        table.add_row(name, entry.model, str(entry.num_tokens or "not tokenized yet"))
    table_console().print(table if entries else "no public prefix")


def _row(entry: Entry) -> dict[str, Any]:
    """Returns the row of a prefix, which has no tokens until a gateway of its model
    has tokenized it.
    """
    return {"model": entry.model, "num_tokens": entry.num_tokens or None}


def _messages(text: str) -> list[dict[str, Any]]:
    try:
        messages = msgspec.json.decode(text, type=list[PrefixMessage])
    except UNREADABLE as error:
        raise ConfigError(f"the file is not a list of messages: {error}") from error
    if not messages:
        raise ConfigError("the prefix is empty")
    return [{"role": each.role, "content": each.content} for each in messages]
