"""Plans over the links between hosts, as a table or JSON: the chosen one and the alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from services.cli.output import table_console
from shared.engine.planning.parallel_plan import ParallelPlan


@dataclass(frozen=True)
class LinksPlan:
    """The plans over links. `planned` is the requested plan, else `chosen`. Bytes are divided
    by `num_tokens`.
    """

    plans: Sequence[ParallelPlan]
    chosen: ParallelPlan
    planned: ParallelPlan
    num_tokens: int

    def row(self, plan: ParallelPlan) -> dict[str, Any]:
        return {
            "tp": plan.tp,
            "pp": plan.pp,
            "hosts": list(plan.hosts),
            "is_chosen": plan is self.chosen,
            "is_planned": plan is self.planned,
            "bytes_per_token": plan.num_bytes / self.num_tokens,
            "host_bytes_per_token": plan.host_bytes / self.num_tokens,
            "exchanges": plan.num_exchanges,
            "host_exchanges": plan.num_host_exchanges,
            "exchange_s": plan.exchange_s,
            "step_s": plan.step_s,
        }


def links_table(found: LinksPlan) -> Table:
    headings = ["", "tp x pp", "stages on", "sent/token", "of it between hosts", "exchanges"]
    headings += ["of them between hosts", "exchange", "step"]
    table = Table(*headings, box=None, header_style="bold")
    for plan in sorted(found.plans, key=lambda each: each.step_s):
        row = found.row(plan)
        table.add_row(
            "chosen" if plan is found.chosen else "asked" if plan is found.planned else "",
            *(f"{plan.tp} x {plan.pp}", " > ".join(plan.hosts)),
            *(f"{row[key]:,.0f} B" for key in ("bytes_per_token", "host_bytes_per_token")),
            *(f"{plan.num_exchanges:,}", f"{plan.num_host_exchanges:,}"),
            *(f"{plan.exchange_s * 1e3:,.2f} ms", f"{plan.step_s * 1e3:,.2f} ms"),
        )
    return table


def show_links(found: LinksPlan) -> None:
    console = table_console()
    console.print(links_table(found))
    if found.planned is not found.chosen:
        slower = found.planned.step_s / found.chosen.step_s
        console.print(
            f"tp {found.planned.tp} x pp {found.planned.pp} was asked for; a step of it takes"
            f" {slower:.3g} times that of tp {found.chosen.tp} x pp {found.chosen.pp}"
        )
