"""Writes a benchmark's result: `benchmarks/results/<name>.json`, a table, one JSON line last."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
STARTED_AT = time.time()
PACKAGES = (
    "torch",
    "numpy",
    "zstandard",
    "uvloop",
    "msgspec",
    "nats-py",
    "redis",
    "xxhash",
    "transformers",
)

Row = dict[str, Any]


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A target: `value` is at least `bar` (or at most, for times and costs)."""

    name: str
    value: float
    bar: float
    unit: str
    holds: bool


def at_least(name: str, value: float, bar: float, unit: str) -> Bar:
    return Bar(name=name, value=round(value, 4), bar=bar, unit=unit, holds=value >= bar)


def at_most(name: str, value: float, bar: float, unit: str) -> Bar:
    return Bar(name=name, value=round(value, 4), bar=bar, unit=unit, holds=value <= bar)


def ratio_columns(ratios: Iterable[float], digits: int = 3) -> Row:
    """Returns the median, least and largest of the rounds' ratios.

    Each ratio is of one round, since the speed of the machine changes between rounds.
    """
    found = sorted(ratios)
    columns = {"ratio": statistics.median(found), "ratio_min": found[0], "ratio_max": found[-1]}
    return {name: round(value, digits) for name, value in columns.items()}


def write_result(
    name: str,
    rows: Sequence[Row],
    bars: Sequence[Bar],
    argv: Sequence[str],
    *,
    is_full: bool = True,
) -> dict[str, Any]:
    """Writes the file, prints the tables and one JSON line, and returns the result.

    `argv` is the command after `python`, to reproduce the run. A result that is not full, of
    options that leave out rows or make them smaller than their bars ask, is printed only: the
    committed one stays.
    """
    result = {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": shlex.join(["python", *argv]),
        "machine": machine(),
        "versions": versions(),
        "rows": list(rows),
        "bars": [msgspec.to_builtins(bar) for bar in bars],
    }
    if is_full:
        RESULTS.mkdir(exist_ok=True)
        encoded = msgspec.json.format(msgspec.json.encode(result), indent=1)
        (RESULTS / f"{name}.json").write_bytes(encoded + b"\n")
    print_tables(name, rows, bars)
    print(msgspec.json.encode(result).decode())
    return result


def commit(root: Path = ROOT) -> str:
    """Returns the commit that ran; marked if tracked files other than results and READMEs had
    changed, if there were modules that are not tracked, or if it is younger than this process.
    """
    described = _git(root, "rev-parse", "--short=12", "HEAD")
    if described is None:
        return "unknown"
    unrelated = (":!benchmarks/results", ":!README.md", ":!benchmarks/README.md")
    is_dirty = (
        _git(root, "diff", "--name-only", "HEAD", "--", ".", *unrelated)
        or _git(root, "ls-files", "--others", "--exclude-standard", "--", "*.py")
        or _head_moved_at(root) > STARTED_AT
    )
    return f"{described}-dirty" if is_dirty else described


def _head_moved_at(root: Path) -> float:
    """Returns the Unix time since which HEAD is this commit; 0 if git has no record of it."""
    selector = _git(root, "log", "-g", "-1", "--format=%gd", "--date=unix") or ""
    return float(selector.partition("{")[2].rstrip("}") or 0)


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def print_tables(name: str, rows: Sequence[Row], bars: Sequence[Bar]) -> None:
    console = Console()
    if rows:
        table = Table(title=name)
        columns = list(dict.fromkeys(column for row in rows for column in row))
        for column in columns:
            table.add_column(column, justify="left" if column == columns[0] else "right")
        for row in rows:
            table.add_row(*(_shown(row.get(column)) for column in columns))
        console.print(table)
    for bar in bars:
        verdict = "holds" if bar.holds else "MISSED"
        console.print(f"{bar.name}: {bar.value:g} {bar.unit} (bar {bar.bar:g}) {verdict}")


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
