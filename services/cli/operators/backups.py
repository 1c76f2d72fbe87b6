"""Runs backups and restores, and prints what they did."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from services.cli.output import plain_table, show, with_store
from shared.backup.backup import make_backup
from shared.backup.backup_file import BackupFile, read_key
from shared.backup.restore import Restore
from shared.backup.restore_texts import Restored
from shared.errors import ConfigError
from shared.tenancy.deletion import retractions

STEP_S = 30.0  # one step of Redis, which may be loaded


def run_backup(
    path: Path, key_file: Path | None, redis_url: str | None, *, with_texts: bool
) -> None:
    """Raises ConfigError, StoreUnavailable."""
    key_text = None if key_file is None else read_key(key_file)
    is_listing = _begin_list()
    counts = with_store(
        redis_url,
        lambda store: make_backup(
            store, path, time.time(), key_text=key_text, with_texts=with_texts
        ),
        timeout_s=STEP_S,
    )
    found = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    print(f"{path}: {found or 'no tenants'}; {path.stat().st_size:,} bytes")
    if not is_listing:
        name = retractions.FILE_VARIABLE
        print(
            f"note: {name} is not set: Redis alone knows what is revoked or removed from now on",
            file=sys.stderr,
        )


def _begin_list() -> bool:
    """Makes the list of what is taken back from now on, if the operator has named one. Raises
    ConfigError, also for a list that a restore could not read.
    """
    named = retractions.file_of(os.environ)
    if named is None:
        return False
    retractions.begin_file(named)
    retractions.read_file(named)
    return True


def run_restore(
    path: Path,
    key_file: Path | None,
    list_files: Sequence[Path],
    redis_url: str | None,
    *,
    is_dry: bool,
    is_forced: bool,
) -> None:
    """Raises ConfigError, StoreUnavailable."""
    backup = BackupFile(path, None if key_file is None else read_key(key_file))
    listed = [each for file in _files(list_files) for each in retractions.read_file(file)]
    result = with_store(
        redis_url,
        lambda store: Restore(
            store, backup, time.time(), writes=not is_dry, is_forced=is_forced
        ).run(listed),
        timeout_s=STEP_S,
    )
    show(_table(result, is_dry=is_dry))


def _files(given: Sequence[Path]) -> Sequence[Path]:
    """Returns the lists that are given, else the operator's, if there is one yet."""
    named = retractions.file_of(os.environ)
    if given or named is None:
        return given
    if not named.exists():
        name = retractions.FILE_VARIABLE
        raise ConfigError(
            f"{name} {named} is not there: without it, what was revoked since would come back; "
            "with an empty file nothing was"
        )
    return [named]


def _table(result: Restored, *, is_dry: bool) -> Table:
    added = "would be added" if is_dry else "added"
    table = plain_table("", "in the backup", added, "taken back since")
    for kind in sorted({*result.found, *result.added}):
        counts = (each[kind] for each in (result.found, result.added, result.retracted))
        table.add_row(kind, *(f"{each:,}" for each in counts))
    return table
