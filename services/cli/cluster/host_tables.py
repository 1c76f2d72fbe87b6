"""The tables of hosts and of their models."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shared.fleet.host_view import HostView, ModelView

HOST_COLUMNS = ("host", "region", "device", "used", "budget", "models", "state")
MODEL_COLUMNS = (
    *("model", "revision", "host", "device", "region", "worker"),
    *("weights", "KV", "wake s", "start s", "hot s", "priority", "state"),
)
DIGEST_CHARS = 12
STYLES = {"ready": "green", "hot": "green", "standby": "cyan", "failed": "red", "cold": "dim"}


def table_of_hosts(hosts: Sequence[HostView]) -> Table:
    """Returns a row for each device."""
    table = Table(*HOST_COLUMNS, box=None, header_style="bold", pad_edge=False)
    _align_right(table, "used", "budget")
    for host in hosts:
        counts = ", ".join(f"{count} {state}" for state, count in host.models.items()) or "none"
        state = Text(host.state, style=STYLES.get(host.state, "yellow"))
        devices = [(it.device, it.used_bytes, it.budget_bytes) for it in host.devices]
        first, *others = devices or [("-", 0, 0)]
        table.add_row(host.process_id, host.region or "-", *_memory(first), counts, state)
        for each in others:
            table.add_row("", "", *_memory(each), "", "")
    return table


def table_of_models(models: Sequence[ModelView]) -> Table:
    table = Table(*MODEL_COLUMNS, box=None, header_style="bold", pad_edge=False)
    _align_right(table, "weights", "KV", "wake s", "start s", "hot s", "priority")
    for each in models:
        table.add_row(
            escape(each.name),
            escape(short_digest(each.revision)),
            each.host_id,
            each.device,
            each.region or "-",
            each.worker_id or "-",
            *(size_text(number) for number in (each.weights_bytes, each.kv_bytes)),
            *(_seconds(duration) for duration in (each.wake_s, each.start_s, each.hot_s)),
            f"{each.priority} pinned" if each.is_pinned else str(each.priority),
            _state(each),
        )
    return table


def short_digest(revision: str) -> str:
    return revision[:DIGEST_CHARS]


def size_text(num_bytes: int) -> str:
    """Returns the bytes in binary units, in three digits; - for 0."""
    if num_bytes == 0:
        return "-"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.{1 if num_bytes < 100 * size else 0}f} {unit}"
    return f"{num_bytes} B"


def _align_right(table: Table, *headings: str) -> None:
    for column in table.columns:
        if column.header in headings:
            column.justify = "right"


def _memory(device: tuple[str, int, int]) -> tuple[str, str, str]:
    name, used_bytes, budget_bytes = device
    return name, size_text(used_bytes), size_text(budget_bytes)


def _seconds(duration_s: float) -> str:
    return (
        "-" if duration_s == 0 else f"{duration_s:.2f}" if duration_s < 100 else f"{duration_s:.0f}"
    )


def _state(model: ModelView) -> Text:
    if model.host_state != "ready":
        return Text(f"{model.state} (host {model.host_state})", style="yellow")
    if model.failure:
        return Text(f"{model.state}: {model.failure}", style="red")
    return Text(model.state, style=STYLES.get(model.state, "yellow"))
