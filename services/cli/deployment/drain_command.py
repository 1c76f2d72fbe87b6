"""`hearth drain`: makes a worker, or all of a machine, safe to stop."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.operators.audited import audited
from services.cli.options import OPERATE, OperatorNatsUrl

app = typer.Typer()


@app.command(
    rich_help_panel=OPERATE,
    epilog="Examples:  hearth drain decode-1 && systemctl stop hearth@decode-1  ·  "
    "hearth drain gpu-host-7 --hand-over-s 0",
)
@audited("drain")
def drain(
    target: Annotated[
        str,
        typer.Argument(
            metavar="WORKER|HOST",
            help="A worker or `hearth host`, or a machine's name, as in `hearth status`.",
        ),
    ],
    hand_over_s: Annotated[
        float,
        typer.Option(
            min=0, help="What still runs then goes on at other workers, at the same token."
        ),
    ] = 60.0,
    timeout_s: Annotated[
        float, typer.Option(min=0, help="Longest wait until it is safe to stop.")
    ] = 120.0,
    is_undone: Annotated[bool, typer.Option("--undo", help="Let it serve again.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also the last worker that decodes its model.")
    ] = False,
    nats_url: OperatorNatsUrl = None,
) -> None:
    """Stop giving requests to a worker, or to all of a machine, and wait until it is safe to stop.

    Prints what it still holds: requests, and prompts whose KV is pushed. Exit status 1 if it holds
    some after --timeout-s; it goes on draining.
    """
    from services.cli.deployment.drain import DrainOptions, run_drain

    options = DrainOptions(target, hand_over_s, timeout_s, is_undone, is_forced=force)
    if not run_drain(nats_url, options):
        raise typer.Exit(1)
