"""A sweep's saved result: one row per piece, their sum, and the endings of their requests."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from tests.simulation.tally import Tally

SUMMED = ("schedules", "failed", "virtual_hours", "cpu_s", "wall_s")

Row = dict[str, Any]


def save(total: Tally, first: int, took_s: float, argv: list[str], *, is_added: bool) -> None:
    """`is_added`: appends to the pieces saved before."""
    from benchmarks.report import RESULTS, at_most, commit, write_result

    path = RESULTS / "simulation.json"
    saved = json.loads(path.read_bytes())["rows"] if is_added and path.exists() else []
    rows = rows_of(saved, piece_of(total, first, took_s, commit()), total)
    num_failed = sum(row["failed"] for row in rows if "commit" in row)
    bars = [at_most("schedules that failed", num_failed, 0, "schedules")]
    write_result("simulation", rows, bars, ["-m", "tests.simulation.sweep", *argv])


def piece_of(total: Tally, first: int, took_s: float, commit: str) -> Row:
    return {
        "first": first,
        "last": first + total.num_schedules - 1,
        "schedules": total.num_schedules,
        "failed": len(total.failed),
        "virtual_hours": round(total.virtual_s / 3600, 2),
        "cpu_s": round(total.cpu_s, 1),
        "wall_s": round(took_s, 1),
        "commit": commit,
    }


def rows_of(saved: list[Row], piece: Row, total: Tally) -> list[Row]:
    pieces = [row for row in saved if "commit" in row]
    before = pieces[-1] if pieces else {}
    if before.get("commit") == piece["commit"] and before["last"] + 1 == piece["first"]:
        pieces[-1] = before | {"last": piece["last"]} | _sum([before, piece])
    else:
        pieces.append(piece)
    return [
        *pieces,
        _sum(pieces),
        *_counts("requests", saved, total.endings),
        *_counts("faults", saved, total.faults),
    ]


def _sum(pieces: list[Row]) -> Row:
    return {name: round(sum(piece[name] for piece in pieces), 2) for name in SUMMED}


def _counts(name: str, saved: list[Row], new: Counter[str]) -> list[Row]:
    counts = Counter({row[name]: row["count"] for row in saved if name in row}) + new
    return [{name: each, "count": count} for each, count in counts.most_common()]
