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
STEP, SUMMED_BATCHES = "decode, batch {}", (1, 64)  # cases of the parts `8b_fast`, `8b_exact`
LOAD, SUMMED_USERS = "both, {} at a time", (1, 16)  # cases of the part `serve`
TABLES = {"of_roofline": STEPS, "ttft_p50_ms": LOADS}  # by the column that its rows have


def gpu_tables(results: Path = ROOT / RESULTS) -> str:
    """Returns Markdown: for each card the rows that have a prediction, and those of clusters."""
    runs = stored_runs(results)
    cards = sorted({run.card for run in runs})
    tables = [_tables([run for run in runs if run.card == card]) for card in cards]
    return "\n".join(tables) or NOTHING


def gpu_summary(results: Path = ROOT / RESULTS) -> list[str]:
    """Returns the rows of README.md: decode and a cluster on each card, by the newest rows."""
    runs = stored_runs(results)
    found = []
    for card in sorted({run.card for run in runs}):
        rows = {
            (row["part"], row["case"]): row
            for run in runs
            for row in run.rows
            if run.card == card and "case" in row
        }
        found += [*_steps(card, rows), *_loads(card, rows)]
    return found


Rows = dict[tuple[str, str], Row]


def _steps(card: str, rows: Rows) -> list[str]:
    """Returns the line of a worker's decode steps; none unless all were measured."""
    modes = []
    for mode in ("fast", "exact"):
        steps = [rows.get((f"8b_{mode}", STEP.format(batch)), {}) for batch in SUMMED_BATCHES]
        if not all("measured_ms" in row for row in steps):
            return []
        times = " and ".join(f"{row['measured_ms']:.1f}" for row in steps)
        modes.append(f"{mode} {times} ms")
    batches = " and ".join(map(str, SUMMED_BATCHES))
    what = f"Decode step of an 8B worker, dummy weights, {card.upper()}"
    measured = f"batch {batches}: {', '.join(modes)}"
    return [f"| {what} | {measured} | `scripts/gpu_kit OUT --call b` |"]


def _loads(card: str, rows: Rows) -> list[str]:
    """Returns the line of a cluster; none unless all loads were measured."""
    loads = [rows.get(("serve", LOAD.format(users)), {}) for users in SUMMED_USERS]
    if not all("tokens_per_s" in row for row in loads):
        return []
    alone, busy = (
        f"TTFT {row['ttft_p50_ms']:.0f} ms, {row['tokens_per_s']:,.0f} tokens/s" for row in loads
    )
    what = f"8B, vocabulary cut to 2,048, over HTTP, {loads[0]['prompt_tokens']:,.0f}-token prompts"
    measured = f"alone {alone}; {SUMMED_USERS[1]} clients {busy}"
    return [f"| {what} | {measured} | `scripts/gpu_kit OUT --call d` |"]


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
