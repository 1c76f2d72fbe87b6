"""The figures that are measured on GPUs, for READMEs: the newest of each case, by card."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks.gpu_results.runs import RESULTS, ROOT, Row, Run, stored_runs

NOTHING = "**Nothing here has run on a GPU yet.**\n"
STEPS = {
    "part": "part",
    "case": "case",
    "context": "context",
    "mode": "mode",
    "measured ms": "measured_ms",
    "of the roofline": "of_roofline",
    "ceiling": "ceiling",
    "commit": "commit",
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
    "commit": "commit",
}
CASE = ("part", "case", "context", "mode")  # columns that tell cases apart
SUMMED = "decode, batch {}"  # cases of the part `graph_step`
SUMMED_BATCHES = (1, 64)
TABLES = {"of_roofline": STEPS, "ttft_p50_ms": LOADS}  # by the column that its rows have


def gpu_tables(results: Path = ROOT / RESULTS) -> str:
    """Returns Markdown: for each card the rows that have a prediction, and those of clusters."""
    runs = stored_runs(results)
    cards = sorted({run.card for run in runs})
    tables = [_tables([run for run in runs if run.card == card]) for card in cards]
    return "\n".join(tables) or NOTHING


def gpu_summary(results: Path = ROOT / RESULTS) -> list[str]:
    """Returns the rows of README.md: decode on each card, of the newest run that has it."""
    found = {run.card: line for run in stored_runs(results) if (line := _summary(run))}
    return [found[card] for card in sorted(found)]


def _summary(run: Run) -> str:
    modes = [text for mode in ("fast", "exact") if (text := _steps(run, mode))]
    if not modes:
        return ""
    what = f"8B decode step in a CUDA graph, {run.card.upper()}"
    batches = " and ".join(map(str, SUMMED_BATCHES))
    measured = f"batch {batches}: {', '.join(modes)}"
    return f"| {what} | {measured} | `scripts/gpu_kit OUT --call a` |"


def _steps(run: Run, mode: str) -> str:
    """Returns the times in a mode; empty if one was not measured."""
    rows = {
        row["case"]: row
        for row in run.rows
        if row["part"] == "graph_step" and row.get("mode") == mode and "measured_ms" in row
    }
    cases = [SUMMED.format(batch) for batch in SUMMED_BATCHES]
    if not rows.keys() >= set(cases):
        return ""
    times = [f"{rows[case]['measured_ms']:.1f}" for case in cases]
    return f"{mode} {' and '.join(times)} ms"


def _tables(runs: list[Run]) -> str:
    """Returns the tables of one card, whose newest run is the last."""
    newest = runs[-1]
    lines = [f"**{_last(newest, 'card')}** — driver {_last(newest, 'driver')}, {newest.date[:10]}"]
    for key, columns in TABLES.items():
        measured = _newest_rows(runs, key)
        if measured:
            lines += ["", _line(columns), _line("---" for _ in columns)]
            lines += [_line(row.get(name, "") for name in columns.values()) for row in measured]
    return "\n".join(lines) + "\n"


def _newest_rows(runs: Iterable[Run], key: str) -> list[Row]:
    """Returns the last row of each case that has the column `key`, with its run's commit."""
    rows = {
        tuple(row.get(name) for name in CASE): row | {"commit": run.commit}
        for run in runs
        for row in run.rows
        if key in row
    }
    return list(rows.values())


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", r"\|") for cell in cells) + " |"


def _last(run: Run, column: str) -> str:
    return str(next((row[column] for row in reversed(run.rows) if row.get(column)), "unknown"))
