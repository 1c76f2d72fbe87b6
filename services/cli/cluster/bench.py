"""`hearth bench`: load test of a running cluster, or of a cluster started for the test.

A table goes to standard output, then one JSON line; progress goes to standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from services.cli.cluster.chat import GatewayAddress, find_gateway
from services.cli.cluster.up import StartupDisplay
from services.cli.model_check import check_models
from services.cli.output import plain_table, table_console, text_console
from services.client.http_client import Sample
from services.client.load_test import LoadTestOptions, Row, measure
from services.local.cluster import LocalCluster
from services.local.plan import UpOptions
from services.local.state import clusters_dir
from services.local.supervisor import Report
from shared.clock import MonotonicClock
from shared.errors import ConfigError

UNLIMITED_WIDTH = 10_000
COLUMNS = {
    "load": "load",
    "requests": "num_requests",
    "errors": "num_errors",
    "requests/s": "requests_per_s",
    "tokens/s": "tokens_per_s",
    "TTFT p50 ms": "ttft_p50_ms",
    "p99": "ttft_p99_ms",
    "ITL p50 ms": "itl_p50_ms",
    "p99 ": "itl_p99_ms",
    "TPOT p50 ms": "tpot_p50_ms",
    "goodput/s": "goodput_per_s",
}


def run_bench(
    url: str | None,
    api_key: str | None,
    up_options: UpOptions | None,
    options: LoadTestOptions,
) -> int:
    """Returns the exit status: 1 if a request failed. Given `up_options`, starts a cluster.

    Raises HearthError as `measure` does, and as LocalCluster does for a started cluster.
    """
    options.check()
    if up_options is not None and url is not None:
        raise ConfigError("--model starts a cluster, --url names a running one: give one of them")
    given = find_gateway(url, api_key) if up_options is None else None
    rows = uvloop.run(_bench(given, up_options, options))
    num_errors = sum(row["num_errors"] for row in rows)
    return 0 if num_errors == 0 else 1


async def _bench(
    given: GatewayAddress | None,
    up_options: UpOptions | None,
    options: LoadTestOptions,
) -> list[Row]:
    console = text_console(stderr=True)
    async with target(given, up_options, console=console) as gateway:
        with LoadDisplay(console, options) as display:
            rows = await measure(
                gateway.url,
                gateway.api_key,
                options,
                display.report,
                certificate=gateway.certificate,
            )
    print_rows(rows)
    line = {"url": gateway.url, "options": options, "rows": rows}
    print(msgspec.json.encode(line).decode())
    sys.stdout.flush()
    return rows


@asynccontextmanager
async def target(
    given: GatewayAddress | None,
    up_options: UpOptions | None,
    *,
    console: Console,
) -> AsyncIterator[GatewayAddress]:
    """Yields the gateway of the cluster under test: the given one, or one started for the test."""
    if up_options is None:
        assert given is not None
        yield given
        return
    check_models(up_options)
    display = StartupDisplay(console, MonotonicClock())
    try:
        async with _cluster(up_options, display.report) as cluster:
            display.close()
            yield GatewayAddress(cluster.url, cluster.api_key)
    finally:
        display.close()


def _cluster(options: UpOptions, report: Report) -> LocalCluster:
    return LocalCluster(
        options,
        MonotonicClock(),
        state_parent=clusters_dir(),
        report=report,
    )


class LoadDisplay:
    """One bar per load: by requests if their number is given, else by time."""

    def __init__(self, console: Console, options: LoadTestOptions) -> None:
        self._options = options
        self._task: TaskID | None = None
        self._began = 0.0
        self._num_answered = self._num_errors = 0
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[answered]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            refresh_per_second=4,  # low: the display shares a core with the client
        )

    def __enter__(self) -> LoadDisplay:
        self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.stop()

    def report(self, label: str, sample: Sample | None) -> None:
        options = self._options
        if sample is None:
            total = options.duration_s if options.num_requests is None else options.num_requests
            self._task = self._progress.add_task(label, total=total, answered="")
            self._began = time.perf_counter()
            self._num_answered = self._num_errors = 0
            return
        assert self._task is not None
        self._num_answered += 1
        self._num_errors += bool(sample.error)
        elapsed_s = time.perf_counter() - self._began
        done = elapsed_s if options.num_requests is None else self._num_answered
        errors = f", {self._num_errors} errors" if self._num_errors else ""
        answered = f"{self._num_answered} answered{errors}"
        self._progress.update(self._task, completed=done, answered=answered)


def print_rows(rows: Sequence[Row]) -> None:
    """Prints a row for each load, or a column for each if the terminal is too narrow for that."""
    console = table_console()
    lines = [tuple(COLUMNS), *(tuple(_shown(row[key]) for key in COLUMNS.values()) for row in rows)]
    table = _table(lines)
    unlimited = console.options.update(max_width=UNLIMITED_WIDTH)
    if console.measure(table, options=unlimited).maximum > console.width:
        table = _table(list(zip(*lines, strict=True)))
    console.print(table)


def _table(lines: Sequence[Sequence[str]]) -> Table:
    """Returns a table whose first line are the headings."""
    table = plain_table(*lines[0])
    for column in table.columns[1:]:
        column.justify = "right"
    for each in lines[1:]:
        table.add_row(*each)
    return table


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
