"""The tables of `hearth status`: workers, other processes, servers, advice of schedulers, hosts."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from services.cli.fleet.demand_table import table_of_demands
from services.cli.fleet.fitted_table import Column, fitted_table
from services.cli.fleet.gpu_health import health_text
from services.cli.fleet.host_tables import STYLES, failures_of, table_of_hosts, table_of_models
from services.cli.fleet.link_tables import tables_of_links, tables_of_tenants
from services.cli.fleet.recent_faults import restarts_text
from services.cli.fleet.rejection_table import capacity_note, table_of_day, table_of_rejections
from services.cli.fleet.report import FleetReport
from services.cli.fleet.times import since
from shared.fleet.fleet_view import ProcessView
from shared.fleet.read_fleet import RecentFigures, ServerView

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"))
FULL_RATIO = 0.95  # of a KV cache in use: that of the alert HearthKvCacheFull
NO_GATEWAY = (
    "No gateway answers: this is what heartbeats show. Processes that were lost before, and "
    "Redis, are unknown."
)


def tables(report: FleetReport, width: int, wall_s: float) -> Group:
    """Returns the tables for a terminal of `width` cells at the Unix time `wall_s`."""
    if not report.rows:
        return Group(Text("no heartbeat received"))
    workers = [row for row in report.rows if row.is_worker]
    services = [row for row in report.rows if not row.is_worker]
    shown: list[RenderableType] = [
        _workers(workers, width, wall_s),
        _services(services, width, wall_s),
        _servers((("redis", report.redis), ("nats", report.nats)), width, wall_s),
        *tables_of_links(report.links, width, wall_s),
        *tables_of_tenants(report.tenant_sites, report.tenant_refusals, width),
    ]
    if report.recent is not None:
        shown.append(Text(_figures(report.recent)))
    if report.rejected:
        shown.append(table_of_rejections(report.rejected, width, wall_s))
    if report.rejected_day:
        shown.append(table_of_day(report.rejected_day, width, wall_s))
    if report.restarts:
        restarted = restarts_text(report.restarts, wall_s)
        text = f"restarted within the last hour: {restarted}; see `hearth logs up`"
        shown.append(Text(text, style="yellow"))
    shown += [_shortage(row) for row in workers if row.num_out_of_memory]
    shown += [Text(note, style="yellow") for note in full_cache_notes(report.rows)]
    if report.demands:
        shown.append(table_of_demands(report.demands, width))
    if report.hosts:
        shown.append(table_of_hosts(report.hosts, width))
    if report.models:
        shown.append(Group(table_of_models(report.models, width), *failures_of(report.models)))
    notes = capacity_note(report), releases_note(report.rows)
    shown += [Text(note, style="yellow") for note in notes if note]
    return Group(*_spaced([*shown, *_notes(report)]))


def _figures(recent: RecentFigures) -> str:
    """Returns the figures of the last minute, in a line for narrow terminals, too."""
    rate = f"last minute: {recent.requests_per_s:,.1f} requests/s"
    if recent.ttft_p50_s is None or recent.ttft_p99_s is None:
        return rate
    return f"{rate}, TTFT {_duration(recent.ttft_p50_s)}, p99 {_duration(recent.ttft_p99_s)}"


def _shortage(row: ProcessView) -> Text:
    """Returns a line on a worker whose device had too little memory."""
    most = row.max_step_tokens
    steps = f"; its steps have at most {most} tokens for now" if most else ""
    times = f"{row.num_out_of_memory} times" if row.num_out_of_memory != 1 else "once"
    return Text(f"{row.process_id} ran out of GPU memory {times}{steps}", style="yellow")


def full_cache_notes(rows: Sequence[ProcessView]) -> list[str]:
    """Returns a line for each worker whose KV cache is full while requests wait: at the worker, or
    at schedulers for one that decodes.
    """
    live = [row for row in rows if not row.is_lost]
    num_queued = sum(row.num_queued_requests or 0 for row in live)
    notes = []
    for row in live:
        places = {"at schedulers": num_queued} if "decode" in row.role.split("+") else {}
        waiting = {"there": row.num_waiting or 0, **places}
        counts = [f"{count:,} {place}" for place, count in waiting.items() if count]
        if counts and _is_full(row):
            notes.append(f"{row.process_id}: KV cache full, requests wait: {', '.join(counts)}")
    return notes


def _is_full(row: ProcessView) -> bool:
    total, free = row.num_total_blocks or 0, row.num_free_blocks or 0
    return total > 0 and 1 - free / total >= FULL_RATIO


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def releases_note(rows: Sequence[ProcessView]) -> str:
    """Returns which releases the live processes are of, if there are several; else ""."""
    of_release: dict[str, list[str]] = {}
    for row in rows:
        if row.release and not row.is_lost and not row.has_stopped:
            of_release.setdefault(row.release, []).append(row.process_id)
    if len(of_release) < 2:
        return ""
    by_size = sorted(of_release.items(), key=lambda each: len(each[1]))
    *few, (most, names) = by_size
    shown = [f"{release}: {', '.join(sorted(each))}" for release, each in few]
    return f"several releases: {'; '.join(shown)}; {most}: {len(names)} others"


def _spaced(shown: Sequence[RenderableType]) -> list[RenderableType]:
    return [part for each in shown for part in (each, Text())][:-1]


def _notes(report: FleetReport) -> list[Text]:
    if report.nats.state == "unavailable":
        return [Text("NATS does not respond: the rows are outdated", style="red")]
    if report.gateway_id is None:
        return [Text(NO_GATEWAY, style="yellow")]
    if report.unready:
        return [Text(f"{report.gateway_id} is not ready: {report.unready}", style="red")]
    return []


def _workers(rows: list[ProcessView], width: int, wall_s: float) -> RenderableType:
    has_models = len({row.model for row in rows if row.model}) > 1
    links_rank = 3 if any("failed" in row.kv_links for row in rows) else 15
    failed_rank = 3 if any(row.num_failed_steps for row in rows) else 13
    columns: list[Column[ProcessView]] = [
        Column("worker", lambda row: row.process_id),
        Column("role", lambda row: row.role, 2),
        Column("model", lambda row: row.model or "-", 3 if has_models else 9),
        Column("region", lambda row: row.region or "-", 10),
        Column("running", lambda row: _count(row.num_running), 1, is_number=True),
        Column("waiting", lambda row: _count(row.num_waiting), 4, is_number=True),
        Column("free blocks", _free_blocks, 6, is_number=True),
        Column("tokens/s", lambda row: _number(row.generated_per_s), 5, is_number=True),
        Column("prompt/s", lambda row: _number(row.prefilled_per_s), 7, is_number=True),
        Column("busy", lambda row: _percent(row.busy_ratio), 6, is_number=True),
        Column("bandwidth", _bandwidth, 11, is_number=True),
        Column("arithmetic", _arithmetic, 12, is_number=True),
        Column("hits", lambda row: _percent(row.hit_ratio), 8, is_number=True),
        Column("failed steps", _failed_steps, failed_rank, is_number=True),
        Column("experts", _imbalance, 14, is_number=True),
        Column("steps", _steps, 4),
        Column("KV links", lambda row: row.kv_links, links_rank),
        Column("GPU", lambda row: health_text(row.device_health), 1),
        Column("state", lambda row: _state(row, wall_s)),
    ]
    return fitted_table(columns, rows, width, style=_style)


def _services(rows: list[ProcessView], width: int, wall_s: float) -> RenderableType:
    columns: list[Column[ProcessView]] = [
        Column("process", lambda row: row.process_id),
        Column("role", lambda row: row.role, 4),
        Column("region", lambda row: row.region or "-", 5),
        Column("streams", lambda row: _count(row.num_open_streams), 2, is_number=True),
        Column("queued", lambda row: _count(row.num_queued_requests), 1, is_number=True),
        Column("longest wait", _wait, 3, is_number=True),
        Column("index", _index, 6),
        Column("unlike prefills", lambda row: _count(row.num_unlike_prefills), 8, is_number=True),
        Column("numerics changes", lambda row: _count(row.num_numerics_changes), 7, is_number=True),
        Column("state", lambda row: _state(row, wall_s)),
    ]
    return fitted_table(columns, rows, width, style=_style)


def _servers(rows: Sequence[tuple[str, ServerView]], width: int, wall_s: float) -> RenderableType:
    columns: list[Column[tuple[str, ServerView]]] = [
        Column("server", lambda row: row[0]),
        Column("state", lambda row: _server_state(row[1])),
        Column("since", lambda row: since(row[1].for_s, wall_s) or "-"),
    ]
    return fitted_table(columns, rows, width)


def _style(row: ProcessView) -> str:
    return "dim" if row.is_lost else ""


def _server_state(server: ServerView) -> Text:
    style = "green" if server.state == "ok" else "cyan" if server.is_sound else "red"
    note = "new, no tenant yet: hearth tenant add" if server.state == "new" else server.state
    return Text(note, style="yellow" if server.state == "unknown" else style)


def _state(row: ProcessView, wall_s: float) -> Text:
    when = since(row.state_age_s, wall_s)
    state = f"lost ({row.state})" if row.is_lost and not row.has_stopped else row.state
    style = "red" if row.is_lost else STYLES.get(row.state, "yellow")
    return Text(f"{state} since {when}" if when else state, style=style)


def _free_blocks(row: ProcessView) -> str:
    if row.num_free_blocks is None:
        return "-"
    return f"{row.num_free_blocks}/{row.num_total_blocks}"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.0%}"


def _bandwidth(row: ProcessView) -> str:
    """Returns the share of the device's peak, or the rate where no peak is known."""
    return _share_or_rate(row.bandwidth_ratio, row.traffic_bytes_per_s, "B/s")


def _arithmetic(row: ProcessView) -> str:
    return _share_or_rate(row.arithmetic_ratio, row.operations_per_s, "FLOP/s")


def _share_or_rate(ratio: float | None, rate: float | None, unit: str) -> str:
    if ratio is not None or rate is None:
        return _percent(ratio)
    scale, prefix = next((each for each in PREFIXES if rate >= each[0]), PREFIXES[-1])
    return f"{rate / scale:.3g} {prefix}{unit}"


def _failed_steps(row: ProcessView) -> str:
    return _count(row.num_failed_steps)


def _steps(row: ProcessView) -> str:
    """Returns the mode of a GPU's steps, and how those of decode are launched."""
    return f"{row.mode}, {row.step_launch}" if row.step_launch else ""


def _imbalance(row: ProcessView) -> str:
    return "-" if row.expert_imbalance is None else f"{row.expert_imbalance:.2f} x"


def _wait(row: ProcessView) -> str:
    return "" if row.oldest_wait_s is None else f"{row.oldest_wait_s:.1f} s"


def _index(row: ProcessView) -> Text:
    """Returns the number of indexed blocks, and whether the index is exact."""
    if row.index_state is None or row.is_lost:
        return Text()
    style = "" if row.index_state == "exact" else "yellow"
    return Text(f"{row.index_state}, {row.num_indexed_blocks} blocks", style=style)


def _count(value: int | None) -> str:
    """Formats a count; empty for a process that does not count this."""
    return "" if value is None else str(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
