"""The audit on the terminal."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.table import Table

from services.cli.output import table_console, with_store
from shared.tenancy import audit
from shared.tenancy.audit import AuditLine


def read_audit(redis_url: str | None, count: int) -> list[AuditLine]:
    """Returns the audit records. Raises ConfigError, or StoreUnavailable if Redis does not
    reply.
    """
    return with_store(redis_url, lambda store: audit.newest(store, count))


def show_audit(lines: list[AuditLine]) -> None:
    table = Table("time (UTC)", "who", "command", "arguments", "outcome", box=None)
    for each in lines:
        at = datetime.fromtimestamp(each.at, UTC).strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(at, each.who, each.command, each.arguments, each.outcome)
    table_console().print(table)
