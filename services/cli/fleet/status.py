"""`hearth status`: the processes of a cluster in tables, from heartbeats on NATS and a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.live import Live

from services.cli.fleet.fleet_poll import open_poll
from services.cli.fleet.fleet_tables import tables
from services.cli.fleet.report import FleetReport
from services.cli.nats_address import find_nats
from services.cli.output import table_console
from services.local.processes.supervision_log import recent_restarts
from services.local.state import clusters_dir, running_cluster
from shared.clock import MonotonicClock
from shared.errors import ConfigError, DependencyUnavailable
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S
from shared.telemetry.log import configure_logging
from shared.transport.bus import NatsRejected

CONNECT_TIMEOUT_S = 5.0
FIRST_BEAT_TIMEOUT_S = 5.0
FIRST_POLL_S = 5 * HEARTBEAT_INTERVAL_S  # two heartbeats of each process, so speeds are known
UNSOUND_STATUS = 1


def run_status(nats_url: str | None, *, is_once: bool, is_json: bool, interval_s: float) -> int:
    """Returns the exit status, after the first table or Ctrl-C: UNSOUND_STATUS if something was
    lost or is unavailable. Raises ConfigError, NatsRejected.
    """
    if interval_s <= 0:
        raise ConfigError(f"--interval-s {interval_s:g} is not positive")
    is_once = is_once or not (is_json or sys.stdout.isatty())  # tables of a pipe have no screen
    configure_logging("status", level="error")  # the table shows what a warning would
    is_sound, logs = True, _local_logs() if nats_url is None else None
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        try:
            is_sound = asyncio.run(
                _status(
                    find_nats(nats_url),
                    is_once=is_once,
                    is_json=is_json,
                    interval_s=interval_s,
                    logs=logs,
                )
            )
        except NatsRejected:
            raise
        except DependencyUnavailable as error:
            print(f"hearth: {error.message}", file=sys.stderr)
            is_sound = False
    return 0 if is_sound else UNSOUND_STATUS


def _local_logs() -> Path:
    """Returns the folder of the local cluster's logs. Raises ConfigError."""
    return running_cluster(clusters_dir())[0] / "logs"


async def _status(
    nats_url: str,
    *,
    is_once: bool,
    is_json: bool,
    interval_s: float,
    first_beat_s: float = FIRST_BEAT_TIMEOUT_S,
    first_poll_s: float = FIRST_POLL_S,
    logs: Path | None = None,
) -> bool:
    """Prints the cluster once, or every `interval_s` until it is interrupted. Returns whether it is
    sound. Without a gateway's answer it waits at most `first_beat_s` for the first heartbeat, then
    `first_poll_s`.
    """
    clock = MonotonicClock()
    async with open_poll(nats_url, clock, timeout_s=CONNECT_TIMEOUT_S) as poll:
        first = await poll.first_report(first_poll_s, first_beat_s if is_once else None)
        report = _with_restarts(first, logs)
        with _screen(is_live=not (is_once or is_json)) as show:
            while True:
                print_json(report) if is_json else show(report)
                if is_once:
                    return report.is_sound
                await clock.sleep(interval_s)
                report = _with_restarts(await poll.report(), logs)


def _with_restarts(report: FleetReport, logs: Path | None) -> FleetReport:
    """`logs`: the folder of a local cluster's logs, which have its restarts."""
    if logs is None:
        return report
    return msgspec.structs.replace(report, restarts=recent_restarts(logs, time.time()))


@contextmanager
def _screen(*, is_live: bool) -> Iterator[Callable[[FleetReport], None]]:
    console = table_console()
    if not is_live:
        yield lambda report: console.print(tables(report, console.width, time.time()))
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda report: live.update(tables(report, console.width, time.time()), refresh=True)


def print_json(report: FleetReport) -> None:
    sys.stdout.write(report.as_json().decode() + "\n")
    sys.stdout.flush()
