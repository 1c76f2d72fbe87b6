"""The figures that are measured on GPUs, for `benchmarks/README.md`: each card's newest run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks.gpu_results.runs import RESULTS, ROOT, Row, Run, stored_runs

NOTHING = "**Nothing here has run on a GPU yet.**\n"
COLUMNS = {
    "part": "part",
    "case": "case",
    "measured ms": "measured_ms",
    "of the roofline": "of_roofline",
    "ceiling": "ceiling",
}


def gpu_tables(results: Path = ROOT / RESULTS) -> str:
    """Returns Markdown: a table for each card, of the rows that have a prediction."""
    newest = {run.card: run for run in stored_runs(results)}
    return "\n".join(_table(run) for _, run in sorted(newest.items())) or NOTHING


def _table(run: Run) -> str:
    title = f"**{_last(run, 'card')}** — driver {_last(run, 'driver')}, commit `{run.commit}`"
    lines = [title + f", {run.date[:10]}", "", _line(COLUMNS), _line("---" for _ in COLUMNS)]
    measured = [row for row in run.rows if "of_roofline" in row]
    return "\n".join([*lines, *map(_cells, measured)]) + "\n"


def _cells(row: Row) -> str:
    return _line(row.get(name, "") for name in COLUMNS.values())


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", r"\|") for cell in cells) + " |"


def _last(run: Run, column: str) -> str:
    return str(next((row[column] for row in reversed(run.rows) if row.get(column)), "unknown"))
