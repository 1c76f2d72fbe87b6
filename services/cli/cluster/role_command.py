"""`hearth role`: changes the roles of a running worker."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.operators.audited import audited
from services.cli.options import OperatorNatsUrl, among

app = typer.Typer()


@app.command(
    rich_help_panel="Operate",
    epilog="Examples:  hearth role worker-1 prefill  ·  hearth role worker-2 both",
)
@audited("role")
def role(
    worker: Annotated[str, typer.Argument(help="Process id, as in `hearth status`.")],
    roles: Annotated[
        str,
        typer.Argument(
            metavar="ROLE",
            help="prefill, decode or both.",
            autocompletion=among("prefill", "decode", "both"),
        ),
    ],
    nats_url: OperatorNatsUrl = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also of the last worker that decodes its model.")
    ] = False,
) -> None:
    """Change the roles of a worker that has the handlers of both. Its streams go on.

    Whether a worker encodes images is decided at its start: `hearth encode`, `hearth prefill
    --role encode`.
    """
    from services.cli.cluster.role_change import run_role

    run_role(nats_url, worker, roles, is_forced=force)
