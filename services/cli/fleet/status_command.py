"""`hearth status` and `hearth health`: a cluster, and one process, by their heartbeats."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.options import OPERATE, START

app = typer.Typer()


@app.command(
    rich_help_panel=START,
    epilog="Exit status 1: something is lost, failed or unavailable.\n\n"
    "Examples:  hearth status  ·  hearth status --once  ·  hearth status --json | jq",
)
def status(
    nats_url: Annotated[
        str | None,
        typer.Option(
            envvar="HEARTH_NATS_URL", help="NATS URL with credential (default: local cluster)."
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one table, then exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="A JSON line instead of a table.")] = False,
    interval_s: Annotated[float, typer.Option(help="Poll interval in seconds.")] = 1.0,
) -> None:
    """Show the workers and other processes of a cluster until Ctrl-C; once if not on a terminal."""
    from services.cli.fleet.status import run_status

    raise typer.Exit(run_status(nats_url, is_once=once, is_json=json, interval_s=interval_s))


@app.command(rich_help_panel=OPERATE, epilog="Exit status 0: healthy. 1: no heartbeat. 2: error.")
def health(
    nats_url: Annotated[str, typer.Option(envvar="HEARTH_NATS_URL", help="URL with credential.")],
    process_id: Annotated[
        str | None,
        typer.Option(
            envvar="HEARTH_PROCESS_ID",
            help="Process (default: this host's, of the NATS URL's user).",
        ),
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for a heartbeat.")] = 3.0,
) -> None:
    """Check whether a process is ready, by its heartbeat on NATS. Without options, where
    HEARTH_METRICS_PORT is set: whether the process of this container is alive, at that port.
    """
    from services.client.health_check import run_probe

    raise typer.Exit(0 if run_probe(nats_url, process_id, timeout_s=timeout_s) else 1)
