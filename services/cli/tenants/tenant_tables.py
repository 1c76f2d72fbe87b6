"""Tables of tenants, their limits, keys and usage."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from rich.table import Table

from services.cli.options import ALL, UNLIMITED
from services.cli.output import plain_table, time_text, with_store
from shared.errors import ConfigError
from shared.store import Store
from shared.tenancy.deletion import retractions
from shared.tenancy.rate_limit import LimitState
from shared.tenancy.site_admin import copied_tenants, is_copied
from shared.tenancy.tenant import LIMITS, USAGE_KINDS, ApiKeyRecord, TenantRecord, UsageRow
from shared.tenancy.tenant_admin import TenantAdmin

T = TypeVar("T")


def with_tenant_admin(redis_url: str | None, action: Callable[[TenantAdmin], Awaitable[T]]) -> T:
    """Runs a function with the tenants' admin. Raises ConfigError, or StoreUnavailable if Redis
    does not reply.
    """
    file = retractions.file_of(os.environ)
    return with_store(redis_url, lambda store: action(TenantAdmin(store, time.time, file)))


async def all_tenants(store: Store) -> dict[str, TenantRecord | None]:
    """Returns the records of this site's tenants, then of those of other sites. Raises
    StoreUnavailable.
    """
    return {**await TenantAdmin(store, time.time).all(), **await copied_tenants(store)}


def last_days(count: int, now: float) -> list[str]:
    """Returns ISO dates, newest first. Raises ConfigError."""
    if not 0 < count <= 400:
        raise ConfigError(f"--days {count} is not from 1 to 400: usage is retained for 400 days")
    today = datetime.fromtimestamp(now, UTC).date()
    return [(today - timedelta(days=back)).isoformat() for back in range(count)]


# ── tables ───────────────────────────────────────────────────────────────────────────────────────


def table_of_tenants(records: Mapping[str, TenantRecord | None]) -> Table:
    others = ("priority", "weight", "retention", "regions", "sites")
    table = plain_table("tenant", *(_heading(name) for name in LIMITS), *others)
    for tenant_id, record in records.items():
        if record is None:
            table.add_row(tenant_id, "its record is unreadable", style="red")
        else:
            table.add_row(
                tenant_id,
                *(_limit(record, name) for name in LIMITS),
                *_others(record),
                record.region_class or _names(record.allowed_regions),
                _sites(record),
            )
    return table


def table_of_limits(record: TenantRecord, state: LimitState) -> Table:
    table = plain_table(record.tenant_id, "limit", "used now")
    for name in LIMITS:
        used = f"{state.used[name]:.0f}" if name in state.used else ""
        if name == "concurrency":
            used = str(state.num_open)
        is_limited = getattr(record, name) is not None and not is_copied(record.tenant_id)
        table.add_row(_heading(name), _limit(record, name), used if is_limited else "")
    table.add_row("models", _names(record.allowed_models))
    table.add_row("regions", _names(record.allowed_regions))
    table.add_row("region class", record.region_class or "none")
    table.add_row("sites", _sites(record))
    for name, value in zip(("priority", "weight", "retention"), _others(record), strict=True):
        table.add_row(name, value)
    return table


def table_of_keys(keys: Iterable[ApiKeyRecord], now: float) -> Table:
    table = plain_table("key", "created", "state")
    for key in keys:
        table.add_row(key.key_id, time_text(key.created_at), _state(key, now))
    return table


def table_of_usage(rows: Sequence[UsageRow]) -> Table:
    """The site is shown if any request ran at another one."""
    has_sites = any(row.site for row in rows)
    names = ("day", "tenant", "model", *(("site",) if has_sites else ()))
    table = plain_table(*names, *(_heading(kind) for kind in USAGE_KINDS))
    for column in table.columns[len(names) :]:
        column.justify = "right"
    for row in rows:
        counts = [f"{getattr(row, kind):,}" for kind in USAGE_KINDS]
        site = (row.site or "here",) if has_sites else ()
        table.add_row(row.day, row.tenant_id, row.model, *site, *counts)
    if len(rows) > 1:
        sums = [f"{sum(getattr(row, kind) for row in rows):,}" for kind in USAGE_KINDS]
        table.add_row("all", *("" for _ in names[1:]), *sums, style="bold")
    return table


def _heading(name: str) -> str:
    return name.replace("_per_min", "/min").replace("_", " ")


def _limit(record: TenantRecord, name: str) -> str:
    limit = getattr(record, name)
    return UNLIMITED if limit is None else f"{limit:,}"


def _names(names: tuple[str, ...] | None) -> str:
    return ALL if names is None else ", ".join(names) or "none"


def _sites(record: TenantRecord) -> str:
    if is_copied(record.tenant_id):
        return f"of {record.tenant_id.partition('/')[0]}"
    return ", ".join(("here", *record.sites))


def _others(record: TenantRecord) -> tuple[str, str, str]:
    retention = "zero" if record.is_zero_retention else "normal"
    return str(record.priority), f"{record.weight:g}", retention


def _state(key: ApiKeyRecord, now: float) -> str:
    if key.revoked_at is not None:
        return f"revoked {time_text(key.revoked_at)}"
    if key.expires_at is None:
        return "valid"
    return f"{'expired' if key.expires_at <= now else 'valid until'} {time_text(key.expires_at)}"
