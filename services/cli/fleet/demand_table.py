"""Shows the advice of the schedulers: workers by model and role, and what waits for them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from services.cli.fleet.fitted_table import Column, fitted_table
from shared.messages import RoleDemand

COLUMNS: tuple[Column[RoleDemand], ...] = (
    Column("model", lambda each: each.model),
    Column("role", lambda each: each.role),
    Column("workers", lambda each: str(each.num_workers), 1, is_number=True),
    Column("wanted", lambda each: _wanted(each), is_number=True),
    Column("queued", lambda each: str(each.num_queued_requests), 2, is_number=True),
    Column("queued tokens", lambda each: str(each.num_queued_tokens), 4, is_number=True),
    Column("work s", lambda each: f"{each.work_s:.1f}", 3, is_number=True),
)


def table_of_demands(demands: Sequence[RoleDemand], width: int) -> Table:
    return fitted_table(COLUMNS, demands, width)


def _wanted(demand: RoleDemand) -> Text:
    is_short = demand.num_wanted_workers > demand.num_workers
    return Text(str(demand.num_wanted_workers), style="yellow" if is_short else "")
