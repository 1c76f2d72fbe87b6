"""`hearth logs`: what the processes of the local cluster have logged."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.options import OPERATE, among
from shared.config import LOG_LEVELS
from shared.errors import HearthError

app = typer.Typer()


def _complete_process(incomplete: str) -> list[str]:
    from services.cli.logs.log_tail import find_logs
    from services.cli.logs.show_logs import log_folders

    try:
        names = find_logs(log_folders()[0])
    except HearthError:
        return []
    return [each for each in names if each.startswith(incomplete)]


@app.command(
    rich_help_panel=OPERATE,
    epilog="Examples:  hearth logs  ·  hearth logs gateway-1 --follow  ·  "
    "hearth logs --level warning  ·  hearth logs --json -n 0 | jq .event",
)
def logs(
    processes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROCESS]...",
            help="Process ids, as in `hearth status`; also nats and redis (default: all).",
            autocompletion=_complete_process,
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")
    ] = False,
    level: Annotated[
        str,
        typer.Option(
            help="Least level: debug, info, warning or error.", autocompletion=among(*LOG_LEVELS)
        ),
    ] = "debug",
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="The last so many lines; 0: all.")
    ] = 100,
    json: Annotated[bool, typer.Option("--json", help="JSON lines, as in the files.")] = False,
) -> None:
    """Show the logs of the local cluster's processes, in the order of time (UTC).

    Without a running cluster, those of the last one that failed.
    """
    from services.cli.logs.show_logs import run_logs

    run_logs(
        tuple(processes or ()), is_following=follow, level=level, num_lines=lines, is_json=json
    )
