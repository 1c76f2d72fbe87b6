"""The list of what operators have taken back, which a backup from before must not bring back.

    command ──▶ list: Redis and a file ──▶ the change itself
    hearth restore: backup, without what the lists take back ──▶ Redis

    hearth:retractions   stream: `data`, a Retraction as JSON

A file survives the loss of Redis; it has one JSON object a line. An entry is written before the
change: an interrupted command leaves an entry too many, and not one too few. A tenant or key is
named together with its creation, so that a later one of the same name is another one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.errors import ConfigError
from shared.store import Command, Store
from shared.tenancy.tenant import ApiKeyRecord, Listed, TenantRecord
from shared.transport.wire_errors import UNREADABLE, one_line

RETRACTIONS = "hearth:retractions"
FILE_VARIABLE = "HEARTH_RETRACTIONS"
MAX_ENTRIES = 100_000
KeyEnd = Literal["expires_at", "revoked_at"]  # fields of an ApiKeyRecord
_READ = "return redis.call('XREVRANGE', KEYS[1], '+', '-')"


class _Retraction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """`at` is in Unix seconds. `created_at` is that of the tenant, or of the key."""

    entry_id: str
    at: float
    tenant_id: Annotated[str, Meta(min_length=1, max_length=256)]
    created_at: float


class TenantRemoved(_Retraction, frozen=True, kw_only=True, tag="tenant_removed"):
    with_usage: bool = False


class KeyEnded(_Retraction, frozen=True, kw_only=True, tag="key_ended"):
    """`digest` is that of an API key, or stands for a NATS client."""

    digest: str
    field: KeyEnd
    ends_at: float


class RetentionChanged(_Retraction, frozen=True, kw_only=True, tag="retention_changed"):
    """What a tenant's record says of its data after a change."""

    is_zero_retention: bool = False
    allowed_regions: Listed | None = None
    region_class: str = ""


Retraction = TenantRemoved | KeyEnded | RetentionChanged


def of_removal(record: TenantRecord, at: float, *, with_usage: bool) -> TenantRemoved:
    return TenantRemoved(
        entry_id=_new_id(),
        at=at,
        tenant_id=record.tenant_id,
        created_at=record.created_at,
        with_usage=with_usage,
    )


def of_key(key: ApiKeyRecord, digest: str, at: float, *, field: KeyEnd, ends_at: float) -> KeyEnded:
    return KeyEnded(
        entry_id=_new_id(),
        at=at,
        tenant_id=key.tenant_id,
        created_at=key.created_at,
        digest=digest,
        field=field,
        ends_at=ends_at,
    )


def of_retention(record: TenantRecord, at: float) -> RetentionChanged:
    return RetentionChanged(
        entry_id=_new_id(),
        at=at,
        tenant_id=record.tenant_id,
        created_at=record.created_at,
        is_zero_retention=record.is_zero_retention,
        allowed_regions=record.allowed_regions,
        region_class=record.region_class,
    )


async def list_entries(
    store: Store, path: Path | None, entries: Iterable[Retraction]
) -> ConfigError | None:
    """Lists entries before their change. Returns the error to raise after the change: a file that
    cannot be written stops no revocation. Raises StoreUnavailable.
    """
    listed = list(entries)
    if not listed:
        return None
    problem = "" if path is None else _append(path, listed)
    await store.write([entry_command(each) for each in listed])
    if not problem:
        return None
    return ConfigError(
        f"it is done, but is not in the list {path}: {problem}; a backup from before would bring "
        "it back"
    )


def entry_command(entry: Retraction) -> Command:
    """Returns the command of Redis that appends an entry."""
    data = msgspec.json.encode(entry)
    return ("XADD", RETRACTIONS, "MAXLEN", "~", MAX_ENTRIES, "*", "data", data)


async def read_listed(store: Store) -> list[Retraction]:
    """Returns the entries in Redis, oldest first. Raises ConfigError, StoreUnavailable."""
    found = await store.evaluate(_READ, [RETRACTIONS], [])
    return [_decoded(fields[1], RETRACTIONS) for _, fields in reversed(found)]


def read_file(path: Path) -> list[Retraction]:
    """Returns the entries of a file, oldest first. Raises ConfigError."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"the list {path}: {error.strerror}") from None
    return [
        _decoded(line, f"the list {path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def united(*lists: Iterable[Retraction]) -> list[Retraction]:
    """Returns each entry of several lists once, in the order of their times."""
    by_id = {each.entry_id: each for entries in lists for each in entries}
    return sorted(by_id.values(), key=lambda each: each.at)


def file_of(environ: Mapping[str, str]) -> Path | None:
    """Returns the file that the operator has named."""
    name = environ.get(FILE_VARIABLE, "")
    return Path(name) if name else None


def begin_file(path: Path) -> None:
    """Makes a list without entries, unless it is there. Raises ConfigError."""
    if problem := _append(path, []):
        raise ConfigError(f"the list {path}: {problem}")


def _append(path: Path, entries: list[Retraction]) -> str:
    """Returns what went wrong, if anything."""
    data = b"".join(msgspec.json.encode(each) + b"\n" for each in entries)
    try:
        with open(path, "ab", opener=partial(os.open, mode=0o600)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _decoded(data: bytes, place: str) -> Retraction:
    """Raises ConfigError: to skip an entry would bring back what it takes back."""
    try:
        return msgspec.json.decode(data, type=Retraction)
    except UNREADABLE as error:
        raise ConfigError(f"{place} is unreadable: {one_line(error)}") from None


def _new_id() -> str:
    return secrets.token_hex(8)
