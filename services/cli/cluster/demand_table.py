"""Shows the advice of the schedulers: workers by model and role, and what waits for them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from shared.messages import RoleDemand

COLUMNS = ("model", "role", "workers", "wanted", "queued", "queued tokens", "work s")


def table_of_demands(demands: Sequence[RoleDemand]) -> Table:
    table = Table(*COLUMNS, box=None, header_style="bold", pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for each in demands:
        table.add_row(
            each.model,
            each.role,
            str(each.num_workers),
            _wanted(each),
            str(each.num_queued_requests),
            str(each.num_queued_tokens),
            f"{each.work_s:.1f}",
        )
    return table


def _wanted(demand: RoleDemand) -> Text:
    is_short = demand.num_wanted_workers > demand.num_workers
    return Text(str(demand.num_wanted_workers), style="yellow" if is_short else "")
