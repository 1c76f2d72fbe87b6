"""Shows the progress of a bundle on standard error, and its savings on standard output."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from services.cli.output import table_console, text_console
from shared.engine.codec.manifest import Manifest
from shared.engine.codec.savings_report import KindRow, rows_by_kind, tensors_of, total_row

COLUMNS = ("dtype", "tensors", "coded", "bits a\nweight", "entropy\nbound", "saved")


class ProgressDisplay:
    """A bar on a terminal; otherwise one line per file. `resumes`: the work of a stopped command is
    continued by the next one.
    """

    def __init__(self, *, resumes: bool = True) -> None:
        self._resumes = resumes
        self._console = text_console(stderr=True)
        self._what = ""
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> ProgressDisplay:
        self._bar.start()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._bar.stop()
        if kind is KeyboardInterrupt:
            left = "run the same command to continue" if self._resumes else "nothing is written"
            print(f"hearth: stopped; {left}", file=sys.stderr)

    def expect(self, num_bytes: int) -> None:
        self._bar.update(self._task, total=num_bytes)

    def advance(self, what: str, num_bytes: int) -> None:
        self._bar.update(self._task, advance=num_bytes, description=what)
        if what != self._what and not self._console.is_terminal:
            print(what, file=sys.stderr)
        self._what = what


def show_savings(manifest: Manifest, out: Path) -> None:
    tensors = tensors_of(manifest)
    total = total_row(tensors)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("layer kind", overflow="fold")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows_by_kind(tensors):
        table.add_row(row.kind, *_cells(row))
    table.add_row(total.kind, *_cells(total), style="bold")
    table_console().print(table)
    print(
        f"{out}: tensors of {decimal(total.num_bytes)} take {decimal(total.num_stored_bytes)}, "
        f"{total.saved_share:.1%} less; each was decoded and compared"
    )
    print(f"serve it: hearth up --model {out}")


def _cells(row: KindRow) -> tuple[str, ...]:
    return (
        row.dtype,
        str(row.num_tensors),
        str(row.num_coded) if row.num_coded else "none",
        f"{row.bits_per_weight:.2f}",
        f"{row.entropy_bits_per_weight:.2f}",
        f"{row.saved_share:.1%}",
    )
