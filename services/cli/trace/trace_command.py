"""`hearth trace`: the timeline of one request."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer()


@app.command(
    rich_help_panel="Operate",
    epilog="Examples:  hearth trace 4f1c09d2a57be3180c6d9e21  ·  hearth trace --json REQUEST_ID",
)
def trace(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID",
            help="From the header x-request-id, or the id of the response, such as chatcmpl-….",
        ),
    ],
    nats_url: Annotated[
        str | None,
        typer.Option(
            envvar="HEARTH_NATS_URL",
            help="NATS URL with an observer's credential (default: local cluster).",
        ),
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show where the time of a request went. Gateways know their last 4,096 requests."""
    from services.cli.trace.trace import run_trace

    raise typer.Exit(run_trace(nats_url, request_id, is_json=is_json))
