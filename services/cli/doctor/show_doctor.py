"""Runs all checks, and prints them as a list or as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from services.cli.doctor.check import Check
from services.cli.doctor.cluster import Addresses, check_cluster
from services.cli.doctor.machine import check_machine
from services.cli.doctor.software import check_software
from services.cli.output import print_json, table_console
from services.local.state import (
    LocalClusterState,
    StartingCluster,
    clusters_dir,
    running_cluster,
    starting_cluster,
)
from shared.config import url_problems
from shared.errors import ConfigError
from shared.nats_urls import nats_servers
from shared.telemetry.log import configure_logging

REDIS_SCHEMES = ("redis", "rediss", "unix")
STARTING_ADVICE = "Run `hearth doctor` again when it is ready; `hearth logs` shows its start."
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def run_doctor(
    nats_url: str | None, redis_url: str | None, url: str | None, *, is_json: bool
) -> bool:
    """Prints the checks. Returns whether none has failed."""
    configure_logging("doctor", level="critical")  # the checks say it
    own = _local_cluster()
    starting = _starting_cluster() if own is None else None
    addresses = _addresses(own, nats_url, redis_url, url)
    ports = _ports(own, starting)
    found = [*check_machine(ports)]
    found += check_software(has_nats=nats_url is not None, has_redis=redis_url is not None)
    if starting is not None:
        found.append(Check("cluster", "warn", starting.text, STARTING_ADVICE))
    if starting is None or addresses != Addresses():
        found += asyncio.run(_of_cluster(addresses))
    if is_json:
        print_json(found)
    else:
        table_console().print(_list_of(found), _summary(found))
    return all(each.level != "fail" for each in found)


async def _of_cluster(addresses: Addresses) -> list[Check]:
    return [each async for each in check_cluster(addresses)]


def _local_cluster() -> tuple[Path, LocalClusterState] | None:
    try:
        return running_cluster(clusters_dir())
    except ConfigError:
        return None


def _starting_cluster() -> StartingCluster | None:
    try:
        return starting_cluster(clusters_dir())
    except ConfigError:
        return None


def _addresses(
    own: tuple[Path, LocalClusterState] | None,
    nats_url: str | None,
    redis_url: str | None,
    url: str | None,
) -> Addresses:
    """Returns the given URLs; if there are none, those of the local cluster. Raises ConfigError."""
    problems = [*url_problems("redis_url", redis_url, schemes=REDIS_SCHEMES)] if redis_url else []
    problems += url_problems("url", url, schemes=("http", "https")) if url else []
    if problems:
        raise ConfigError("; ".join(problems))
    if nats_url:
        nats_servers(nats_url)
    if (nats_url, redis_url, url) != (None, None, None) or own is None:
        return Addresses(nats_url or "", redis_url or "", (url or "").rstrip("/"))
    folder, state = own
    nats_url = state.nats_url_of("observer") or ""
    return Addresses(nats_url, state.redis_url, state.url, logs=folder / "logs")


def _ports(
    own: tuple[Path, LocalClusterState] | None, starting: StartingCluster | None
) -> frozenset[int]:
    """Returns the ports of this user's cluster, also of one that is starting."""
    if own is not None:
        return frozenset(filter(None, (urlsplit(own[1].url).port, own[1].nats_port)))
    port = None if starting is None else urlsplit(starting.start.url).port
    return frozenset() if port is None else frozenset({port})


def _list_of(found: Iterable[Check]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in found:
        style = STYLES[each.level]
        text = Text(each.text)
        if each.advice:
            text.append(f"\n{each.advice}", style="dim")
        table.add_row(Text(each.level, style=style), each.name, text)
    return table


def _summary(found: list[Check]) -> Padding:
    counts = {level: sum(each.level == level for each in found) for level in STYLES}
    warnings = "warning" if counts["warn"] == 1 else "warnings"
    text = f"{counts['ok']} ok, {counts['warn']} {warnings}, {counts['fail']} failed"
    worst = "fail" if counts["fail"] else "warn" if counts["warn"] else "ok"
    return Padding(Text(text, style=STYLES[worst]), (1, 0, 0, 0))
