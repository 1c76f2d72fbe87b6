"""Shows the requests that gateways have rejected, and what is missing to serve more."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from services.cli.fleet.fitted_table import Column, fitted_table
from services.cli.fleet.report import FleetReport
from services.cli.fleet.times import since
from shared.errors import CAPACITY_CODES
from shared.fleet.read_fleet import RejectedCode, Rejection
from shared.messages import RoleDemand

LONG_WAIT_S = 5.0
MAX_ROWS = 8


def table_of_rejections(rejected: Sequence[Rejection], width: int, wall_s: float) -> Group:
    """Returns the most frequent ones, MAX_ROWS at most."""
    columns: tuple[Column[Rejection], ...] = (
        Column("code", lambda each: each.code),
        Column("count", lambda each: f"{each.count:,}", is_number=True),
        Column("last", lambda each: since(wall_s - each.at, wall_s)),
        Column("gateway", lambda each: each.gateway_id, 1),
    )
    rows = sorted(rejected, key=lambda each: -each.count)
    shown: list[RenderableType] = [
        Text("rejected in the last 15 minutes:"),
        fitted_table(columns, rows[:MAX_ROWS], width),
    ]
    if len(rows) > MAX_ROWS:
        num_others = sum(each.count for each in rows[MAX_ROWS:])
        shown.append(Text(f"and {num_others:,} others: hearth status --json"))
    return Group(*shown)


def table_of_day(rejected: Sequence[RejectedCode], width: int, wall_s: float) -> Group:
    """Returns the most frequent codes, MAX_ROWS at most."""
    columns: tuple[Column[RejectedCode], ...] = (
        Column("code", lambda each: each.code),
        Column("count", lambda each: f"{each.count:,}", is_number=True),
        Column("first", lambda each: since(wall_s - each.first_at, wall_s)),
        Column("last", lambda each: since(wall_s - each.last_at, wall_s)),
    )
    shown: list[RenderableType] = [
        Text("rejected within 24 hours:"),
        fitted_table(columns, rejected[:MAX_ROWS], width),
    ]
    if len(rejected) > MAX_ROWS:
        num_others = sum(each.count for each in rejected[MAX_ROWS:])
        shown.append(Text(f"and {num_others:,} others: hearth status --json"))
    return Group(*shown)


def capacity_note(report: FleetReport) -> str:
    """Returns what waits long or was rejected for lack of capacity, and how many workers are
    wanted; empty if nothing did.
    """
    rows = [each for each in report.rows if each.num_queued_requests and not each.is_lost]
    longest_s = max((each.oldest_wait_s or 0.0 for each in rows), default=0.0)
    num_rejected = sum(each.count for each in report.rejected if each.code in CAPACITY_CODES)
    parts = []
    if longest_s >= LONG_WAIT_S:
        num_queued = sum(each.num_queued_requests or 0 for each in rows)
        parts.append(f"{_requests(num_queued)} wait, the longest {longest_s:.1f} s")
    if num_rejected:
        subject = f"{num_rejected:,}" if parts else _requests(num_rejected)
        parts.append(f"{subject} rejected in 15 minutes for lack of capacity")
    return "; ".join(parts) + (_advice(report.demands) if parts else "")


def _requests(count: int) -> str:
    return f"{count:,} request" + ("s" if count != 1 else "")


def _advice(demands: Sequence[RoleDemand]) -> str:
    short = [each for each in demands if each.num_wanted_workers > each.num_workers]
    if not short:
        return ""
    has_models = len({each.model for each in demands}) > 1
    wanted = (
        f"{each.num_wanted_workers} {each.role}" + (f" of {each.model}" if has_models else "")
        for each in short
    )
    return f": add workers (wanted {', '.join(wanted)})"
