"""`hearth doctor`: checks this machine, and its cluster or one whose URLs are given."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.options import START

app = typer.Typer()


@app.command(
    rich_help_panel=START,
    epilog="Examples:  hearth doctor  ·  HEARTH_NATS_URL=nats://ID:PASSWORD@HOST:4222 hearth doctor"
    "  ·  hearth doctor --json",
)
def doctor(
    nats_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="HEARTH_NATS_URL",
            help="NATS URL with credential (default: the local cluster's).",
        ),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="HEARTH_REDIS_URL",
            help="Redis URL (default: the local cluster's).",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="HEARTH_URL",
            help="Gateway URL (default: the local cluster's).",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON instead of a list.")] = False,
) -> None:
    """Check this machine and its cluster: each line says what to do. Exit status 1: one failed."""
    from services.cli.doctor.show_doctor import run_doctor

    raise typer.Exit(0 if run_doctor(nats_url, redis_url, url, is_json=json) else 1)
