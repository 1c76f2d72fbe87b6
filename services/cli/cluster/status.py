"""`hearth status`: the processes of a cluster in a table, from their heartbeats on NATS."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import nats.errors
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.cli.cluster.demand_table import table_of_demands
from services.cli.cluster.host_tables import STYLES, table_of_hosts, table_of_models
from services.cli.output import table_console
from services.local.credentials import process_id_for
from services.local.state import clusters_dir, running_cluster
from shared.background import Background
from shared.clock import Clock, MonotonicClock
from shared.errors import ConfigError, DependencyUnavailable
from shared.fleet.fleet_view import FleetView, ProcessView
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S, TICK_S
from shared.lifecycle.host_models import ReceivedModels
from shared.messages import Heartbeat
from shared.nats_urls import without_password
from shared.subjects import HEARTBEATS, CredentialRole
from shared.telemetry.log import configure_logging
from shared.tls import TlsFiles
from shared.transport.bus import NatsBus

CONNECT_TIMEOUT_S = 5.0
FIRST_BEAT_TIMEOUT_S = 5.0
FIRST_POLL_S = 5 * HEARTBEAT_INTERVAL_S  # two heartbeats of each process, so speeds are known
EXPERTS = "experts"  # a column only if a worker has experts
WORKER_COLUMNS = (
    *("worker", "role", "model", "region", "running", "waiting"),
    *("free blocks", "tokens/s", "prompt/s", "hits", "failed steps", EXPERTS, "state"),
)

SERVICE_COLUMNS = (
    *("process", "role", "region", "index"),
    *("unlike prefills", "numerics changes", "state"),
)


def find_nats(nats_url: str | None, role: CredentialRole = "observer") -> str:
    """Returns the given URL, else the local cluster's URL with its credential of this role.

    Raises ConfigError.
    """
    if nats_url is not None:
        return nats_url
    _, state = running_cluster(clusters_dir())
    found = state.nats_url_of(role)
    if found is None:
        raise ConfigError("this cluster uses an external NATS: give its URL in HEARTH_NATS_URL")
    return found


def run_status(nats_url: str | None, *, is_once: bool, is_json: bool, interval_s: float) -> None:
    """Returns after Ctrl-C, or after the first table. Raises ConfigError, DependencyUnavailable."""
    if interval_s <= 0:
        raise ConfigError(f"--interval-s {interval_s:g} is not positive")
    is_once = is_once or not (is_json or sys.stdout.isatty())  # tables of a pipe have no screen
    configure_logging("status", level="error")  # the table shows what a warning would
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(
            _status(find_nats(nats_url), is_once=is_once, is_json=is_json, interval_s=interval_s)
        )


async def _status(
    nats_url: str,
    *,
    is_once: bool,
    is_json: bool,
    interval_s: float,
    first_beat_s: float = FIRST_BEAT_TIMEOUT_S,
    first_poll_s: float = FIRST_POLL_S,
) -> None:
    """Prints the cluster's processes once, or every `interval_s` until it is interrupted.

    It waits at most `first_beat_s` for the first heartbeat, then `first_poll_s` for the others.
    """
    clock, view, background = MonotonicClock(), FleetView(), Background()
    process_id = process_id_for("observer", nats_url)
    bus = await NatsBus.connect(
        nats_url,
        process_id=process_id,
        timeout_s=CONNECT_TIMEOUT_S,
        tls=TlsFiles.of_environ("NATS", os.environ),
    )
    received = asyncio.Event()

    models = ReceivedModels(bus, clock, background)

    def on_heartbeat(beat: Heartbeat) -> None:
        view.observe(models.complete(beat), clock.now())
        if view.rows():
            received.set()

    try:
        await bus.subscribe(HEARTBEATS, Heartbeat, on_heartbeat)
        background.start_own(_judge(bus, view, clock))
        if is_once:
            await _first_beat(received, nats_url, first_beat_s)
        await clock.sleep(first_poll_s)
        with _screen(is_live=not (is_once or is_json)) as show:
            while True:
                print_json(view) if is_json else show(tables(view, is_connected=bus.is_connected))
                if is_once:
                    return
                await clock.sleep(interval_s)
    finally:
        await background.stop()
        await bus.close()


async def _first_beat(received: asyncio.Event, nats_url: str, timeout_s: float) -> None:
    """Waits for the first heartbeat, which a machine under load may delay for seconds.

    Raises DependencyUnavailable.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await received.wait()
    except TimeoutError:
        where = without_password(nats_url)
        message = f"no heartbeat at {where} within {timeout_s:g} s"
        raise DependencyUnavailable(message) from None


async def _judge(bus: NatsBus, view: FleetView, clock: Clock) -> None:
    """Uses server round trips instead of heartbeat echoes, as an observer sends no heartbeats."""
    while True:
        with contextlib.suppress(nats.errors.Error, OSError):
            await bus.flush()
            view.echo(clock.now())
        view.tick(clock.now())
        await clock.sleep(TICK_S)


@contextmanager
def _screen(*, is_live: bool) -> Iterator[Callable[[RenderableType], None]]:
    console = table_console()
    if not is_live:
        yield console.print
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda shown: live.update(shown, refresh=True)


def print_json(view: FleetView) -> None:
    """Prints the view as JSON. `roles` is there only if a scheduler advises, `hosts` and `models`
    only if there is a host.
    """
    rows, hosts = view.rows(), view.hosts()
    line: dict[str, Any] = {
        "workers": [row for row in rows if row.is_worker],
        "services": [row for row in rows if not row.is_worker],
    }
    if demands := view.demands():
        line["roles"] = demands
    if hosts:
        line |= {"hosts": hosts, "models": view.models()}
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


def tables(view: FleetView, *, is_connected: bool = True) -> Group:
    """Returns the workers, below them all other processes, what schedulers advise, and the hosts
    with their models, if any.
    """
    rows, hosts = view.rows(), view.hosts()
    workers = _table_of_workers([row for row in rows if row.is_worker])
    services = Table(*SERVICE_COLUMNS, box=None, header_style="bold")
    services.pad_edge = False
    for column in services.columns[4:-1]:
        column.justify = "right"
    for row in rows:
        if not row.is_worker:
            services.add_row(*_service_cells(row))
    parts: list[RenderableType] = (
        [workers, Text(), services] if rows else [Text("no heartbeat received")]
    )
    if demands := view.demands():
        parts += [Text(), table_of_demands(demands)]
    if hosts:
        parts += [Text(), table_of_hosts(hosts)]
    if models := view.models():
        parts += [Text(), table_of_models(models)]
    if not is_connected:
        parts.append(Text("NATS does not respond: the rows are outdated", style="red"))
    return Group(*parts)


def _table_of_workers(rows: list[ProcessView]) -> Table:
    has_experts = any(row.expert_imbalance is not None for row in rows)
    columns = [each for each in WORKER_COLUMNS if each != EXPERTS or has_experts]
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for column in table.columns[4:-1]:
        column.justify = "right"
    for row in rows:
        cells = dict(zip(WORKER_COLUMNS, _worker_cells(row), strict=True))
        table.add_row(*(cells[each] for each in columns), style="dim" if row.is_lost else "")
    return table


def _worker_cells(row: ProcessView) -> list[str | Text]:
    return [
        row.process_id,
        row.role,
        row.model or "-",
        row.region or "-",
        str(row.num_running),
        str(row.num_waiting),
        f"{row.num_free_blocks}/{row.num_total_blocks}",
        _number(row.generated_per_s),
        _number(row.prefilled_per_s),
        "-" if row.hit_ratio is None else f"{row.hit_ratio:.0%}",
        str(row.num_failed_steps),
        "-" if row.expert_imbalance is None else f"{row.expert_imbalance:.2f} x",
        _state(row),
    ]


def _service_cells(row: ProcessView) -> list[str | Text]:
    return [
        row.process_id,
        row.role,
        row.region or "-",
        _index(row),
        _count(row.num_unlike_prefills),
        _count(row.num_numerics_changes),
        _state(row),
    ]


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


def _state(row: ProcessView) -> Text:
    if row.is_lost:
        return Text(f"lost ({row.state})", style="red")
    return Text(row.state, style=STYLES.get(row.state, "yellow"))
