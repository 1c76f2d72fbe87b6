"""`hearth stop`: ends the local cluster of `hearth up` in another terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.options import START

app = typer.Typer()


@app.command(rich_help_panel=START, epilog="Examples:  hearth stop  ·  hearth stop --timeout-s 5")
def stop(
    timeout_s: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for running requests and the end.")
    ] = 60.0,
) -> None:
    """Stop the local cluster that started last, in order, as Ctrl-C in its terminal does."""
    from services.cli.cluster.stop import stop_cluster
    from services.local.state import clusters_dir

    print(f"stopped {stop_cluster(clusters_dir(), timeout_s=timeout_s)}")
