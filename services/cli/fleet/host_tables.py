"""The tables of hosts and of their models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from services.cli.fleet.fitted_table import Column, fitted_table
from shared.fleet.host_view import HostView, ModelView

DIGEST_CHARS = 12
STYLES = {"ready": "green", "hot": "green", "standby": "cyan", "failed": "red", "cold": "dim"}


@dataclass(frozen=True, slots=True)
class _DeviceRow:
    """A device of a host. Only the first one names its host."""

    host: HostView | None
    device: str
    used_bytes: int
    budget_bytes: int


HOST_COLUMNS: tuple[Column[_DeviceRow], ...] = (
    Column("host", lambda row: row.host.process_id if row.host else ""),
    Column("region", lambda row: (row.host.region or "-") if row.host else "", 5),
    Column("device", lambda row: row.device, 3),
    Column("used", lambda row: size_text(row.used_bytes), 1, is_number=True),
    Column("budget", lambda row: size_text(row.budget_bytes), 2, is_number=True),
    Column("models", lambda row: _counts(row.host) if row.host else "", 4),
    Column("state", lambda row: _host_state(row.host) if row.host else ""),
)
MODEL_COLUMNS: tuple[Column[ModelView], ...] = (
    Column("model", lambda each: each.name),
    Column("revision", lambda each: short_digest(each.revision), 4),
    Column("host", lambda each: each.host_id, 1),
    Column("device", lambda each: each.device, 7),
    Column("region", lambda each: each.region or "-", 10),
    Column("worker", lambda each: each.worker_id or "-", 5),
    Column("weights", lambda each: size_text(each.weights_bytes), 3, is_number=True),
    Column("KV", lambda each: size_text(each.kv_bytes), 2, is_number=True),
    Column("wake s", lambda each: _seconds(each.wake_s), 6, is_number=True),
    Column("start s", lambda each: _seconds(each.start_s), 8, is_number=True),
    Column("hot s", lambda each: _seconds(each.hot_s), 9, is_number=True),
    Column("priority", lambda each: _priority(each), 11, is_number=True),
    Column("state", lambda each: _model_state(each)),
)


def table_of_hosts(hosts: Sequence[HostView], width: int) -> Table:
    """Returns a row for each device."""
    rows = []
    for host in hosts:
        devices = [(each.device, each.used_bytes, each.budget_bytes) for each in host.devices]
        first, *others = devices or [("-", 0, 0)]
        rows += [_DeviceRow(host, *first), *(_DeviceRow(None, *each) for each in others)]
    return fitted_table(HOST_COLUMNS, rows, width)


def table_of_models(models: Sequence[ModelView], width: int) -> Table:
    return fitted_table(MODEL_COLUMNS, models, width)


def failures_of(models: Sequence[ModelView]) -> list[Text]:
    """Returns a line for each model that failed, for below the table."""
    return [
        Text(f"{each.name} on {each.host_id}: {each.failure}", style="red")
        for each in models
        if each.failure
    ]


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


def _counts(host: HostView) -> str:
    return ", ".join(f"{count} {state}" for state, count in host.models.items()) or "none"


def _host_state(host: HostView) -> Text:
    return Text(host.state, style=STYLES.get(host.state, "yellow"))


def _priority(model: ModelView) -> str:
    return f"{model.priority} pinned" if model.is_pinned else str(model.priority)


def _seconds(duration_s: float) -> str:
    if duration_s == 0:
        return "-"
    return f"{duration_s:.2f}" if duration_s < 100 else f"{duration_s:.0f}"


def _model_state(model: ModelView) -> Text:
    if model.host_state != "ready":
        return Text(f"{model.state} (host {model.host_state})", style="yellow")
    return Text(model.state, style=STYLES.get(model.state, "yellow"))
