"""The figures that are measured on GPUs, for `benchmarks/README.md`: each card's newest run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks.gpu_results.runs import RESULTS, ROOT, Run, stored_runs

NOTHING = "**Nothing here has run on a GPU yet.**\n"
STEPS = {
    "part": "part",
    "case": "case",
    "context": "context",
    "mode": "mode",
    "measured ms": "measured_ms",
    "of the roofline": "of_roofline",
    "ceiling": "ceiling",
}
LOADS = {
    "a cluster over HTTP": "case",
    "requests": "num_requests",
    "errors": "num_errors",
    "tokens/s": "tokens_per_s",
    "TTFT p50 ms": "ttft_p50_ms",
    "TTFT p99 ms": "ttft_p99_ms",
    "ITL p50 ms": "itl_p50_ms",
    "ITL p99 ms": "itl_p99_ms",
}
TABLES = {"of_roofline": STEPS, "ttft_p50_ms": LOADS}  # by the column that its rows have


def gpu_tables(results: Path = ROOT / RESULTS) -> str:
    """Returns Markdown: for each card the rows that have a prediction, and those of clusters."""
    newest = {run.card: run for run in stored_runs(results)}
    return "\n".join(_table(run) for _, run in sorted(newest.items())) or NOTHING


def _table(run: Run) -> str:
    title = f"**{_last(run, 'card')}** — driver {_last(run, 'driver')}, commit `{run.commit}`"
    lines = [title + f", {run.date[:10]}"]
    for key, columns in TABLES.items():
        measured = [row for row in run.rows if key in row]
        if measured:
            lines += ["", _line(columns), _line("---" for _ in columns)]
            lines += [_line(row.get(name, "") for name in columns.values()) for row in measured]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", r"\|") for cell in cells) + " |"


def _last(run: Run, column: str) -> str:
    return str(next((row[column] for row in reversed(run.rows) if row.get(column)), "unknown"))
