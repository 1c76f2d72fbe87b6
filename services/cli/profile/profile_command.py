"""`hearth profile`: records steps of a running worker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.operators.audited import audited
from services.cli.options import OPERATE, OperatorNatsUrl

app = typer.Typer()


@app.command(
    rich_help_panel=OPERATE,
    epilog="Examples:  hearth profile decode-1  ·  hearth profile decode-1 --steps 50 --out FILE",
)
@audited("profile")
def profile(
    worker: Annotated[str, typer.Argument(help="Process id, as in `hearth status`.")],
    steps: Annotated[int, typer.Option("--steps", help="Number of steps, 1 to 200.")] = 20,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The trace, JSON in gzip (default: WORKER-profile.json.gz); - is standard output.",
        ),
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout-s", help="Seconds in which the steps come, at most 300."),
    ] = 30.0,
    nats_url: OperatorNatsUrl = None,
) -> None:
    """Record the next steps of a worker for ui.perfetto.dev. They are slower meanwhile."""
    from services.cli.profile.step_profile import run_profile

    run_profile(nats_url, worker, steps, timeout_s=timeout_s, out=out)
