"""The audit on the terminal."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime

from services.cli.output import plain_table, print_json, table_console, with_store
from shared.tenancy import audit
from shared.tenancy.audit import AUDIT_KINDS, AuditKind, AuditLine


def read_audit(
    redis_url: str | None, count: int, kinds: Collection[AuditKind] = AUDIT_KINDS
) -> list[AuditLine]:
    """Returns the last lines of these kinds. Raises ConfigError, or StoreUnavailable if Redis does
    not reply.
    """
    return with_store(redis_url, lambda store: audit.newest(store, count, kinds))


def print_lines(lines: list[AuditLine]) -> None:
    """Prints JSON Lines."""
    for each in lines:
        print_json(each)


def show_audit(lines: list[AuditLine]) -> None:
    table = plain_table("time (UTC)", "kind", "who", "command", "arguments", "outcome")
    for each in lines:
        at = datetime.fromtimestamp(each.at, UTC).strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(at, each.kind, each.who, each.command, each.arguments, each.outcome)
    table_console().print(table)
