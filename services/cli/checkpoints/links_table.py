"""Plans over the links between hosts, as a table or JSON: the chosen one and the alternatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from services.cli.output import plain_table, table_console
from shared.engine.parallel.links import Host, LinkTable
from shared.engine.planning.memory_plan import size_text
from shared.engine.planning.parallel_plan import ParallelPlan
from shared.kv_wire.link import MAX_DEVICE_FRAME_BYTES, LinkEnd, PushPlan
from shared.kv_wire.ports.push_plan import plan_push


@dataclass(frozen=True)
class LinksPlan:
    """The plans over links. `planned` is the requested plan, else `chosen`. Bytes are divided
    by `num_tokens`.
    """

    plans: Sequence[ParallelPlan]
    chosen: ParallelPlan
    planned: ParallelPlan
    num_tokens: int
    links: LinkTable

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
    table = plain_table(*headings)
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


@dataclass(frozen=True)
class HostPush:
    """The push of a prompt's KV from a worker on one host to a worker on another, or the same."""

    sender: str
    receiver: str
    plan: PushPlan
    num_bytes: int
    latency_s: float

    def row(self) -> dict[str, Any]:
        return {
            "hosts": [self.sender, self.receiver],
            "port": self.plan.port,
            "place": self.plan.place,
            "frame_bytes": self.plan.frame_bytes,
            "num_bytes": self.num_bytes,
            "copies": list(self.plan.copies),
            "predicted_s": self.latency_s + self.plan.seconds(self.num_bytes),
        }


def host_pushes(table: LinkTable, num_bytes: int) -> Iterator[HostPush]:
    """Plans a push of this many bytes between all hosts, and inside each, where two workers with
    GPUs have one each.
    """
    for first, sender in enumerate(table.hosts):
        for receiver in table.hosts[first:]:
            is_local = receiver is sender
            link = None if is_local else table.between(sender, receiver)
            plan = plan_push(
                _end(sender, 0),
                _end(receiver, 1),
                is_local=is_local,
                wire_bytes_per_s=None if link is None else link.bytes_per_s,
            )
            latency_s = 0.0 if link is None else link.latency_s
            yield HostPush(sender.name, receiver.name, plan, num_bytes, latency_s)


def _end(host: Host, index: int) -> LinkEnd:
    device = f"{host.name}:{index}" if host.device == "cuda" else ""
    return LinkEnd(host=host.name, device=device, max_frame_bytes=MAX_DEVICE_FRAME_BYTES)


def pushes_table(pushes: Sequence[HostPush]) -> Table:
    headings = ("KV from", "to", "where", "port", "frames", "bytes", "copies of each", "predicted")
    table = plain_table(*headings)
    for each in pushes:
        row = each.row()
        table.add_row(
            *(each.sender, each.receiver, row["place"], row["port"]),
            *(size_text(row[key]) for key in ("frame_bytes", "num_bytes")),
            f"{len(row['copies'])}: {', '.join(row['copies'])}",
            f"{row['predicted_s'] * 1e3:,.2f} ms",
        )
    return table


def show_links(found: LinksPlan, pushes: Sequence[HostPush]) -> None:
    console = table_console()
    console.print(links_table(found))
    console.print(pushes_table(pushes))
    if found.planned is not found.chosen:
        slower = found.planned.step_s / found.chosen.step_s
        console.print(
            f"tp {found.planned.tp} x pp {found.planned.pp} was asked for; a step of it takes"
            f" {slower:.3g} times that of tp {found.chosen.tp} x pp {found.chosen.pp}"
        )
