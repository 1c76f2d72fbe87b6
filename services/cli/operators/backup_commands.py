"""`hearth backup` and `hearth restore`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.operators.audited import audited
from services.cli.options import OPERATE

RedisUrl = Annotated[
    str | None,
    typer.Option(envvar="HEARTH_REDIS_URL", help="Redis URL (default: the local cluster's)."),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(help="A file with a random text, which encrypts."),
]

app = typer.Typer()


@app.command(
    rich_help_panel=OPERATE,
    epilog="Example:  hearth backup /var/backups/hearth.backup --key-file backup.key",
)
@audited("backup")
def backup(
    file: Annotated[Path, typer.Argument(help="Where it goes; an earlier backup is replaced.")],
    key_file: KeyFile = None,
    without_texts: Annotated[
        bool,
        typer.Option("--without-texts", help="No stored responses, no named prefixes."),
    ] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Write what Redis holds into one file, while the cluster serves.

    No texts of tenants with zero retention are in it. What is revoked or removed later is in the
    list that HEARTH_RETRACTIONS names: `hearth restore` brings none of it back.
    """
    from services.cli.operators.backups import run_backup

    run_backup(file, key_file, redis_url, with_texts=not without_texts)


@app.command(
    rich_help_panel=OPERATE,
    epilog="Examples:  hearth restore hearth.backup --dry-run  ·  "
    "hearth restore hearth.backup --retractions retractions.jsonl",
)
@audited("restore")
def restore(
    file: Annotated[Path, typer.Argument(help="A file of `hearth backup`.")],
    list_files: Annotated[
        list[Path] | None,
        typer.Option(
            "--retractions",
            help="A list of what was revoked and removed since; may be repeated "
            "(default: HEARTH_RETRACTIONS).",
        ),
    ] = None,
    key_file: KeyFile = None,
    is_dry: Annotated[bool, typer.Option("--dry-run", help="Change nothing.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also into a Redis with another cluster's records.")
    ] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Add what Redis lacks of a backup, while the cluster serves.

    What Redis has stays as it is. What was revoked, removed or switched to zero retention since the
    backup stays so. It may be repeated.
    """
    from services.cli.operators.backups import run_restore

    run_restore(file, key_file, list_files or [], redis_url, is_dry=is_dry, is_forced=force)
