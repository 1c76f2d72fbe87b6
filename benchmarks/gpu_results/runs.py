"""Runs of the GPU kit: the folder that it leaves, and the committed rows of each card and commit.

benchmarks/results/gpu/<card>/<date>-<commit>/rows.jsonl     a row a line, of all calls of a commit

A checkout with changes has `-dirty` and the digest of its kernels behind the commit, as calls of
other changes are other runs.

The kit's own row of a call has its date and commit; a row `ended` of each part has its status.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("benchmarks/results/gpu")
ROWS, SUMMARY = "rows.jsonl", "summary.json"
KIT = "kit"  # the part of the kit's own row
ENDED = "ended"  # the case of the row on how a part ended
ENDING = ("status", "reason", "seconds", "deadline_s")
DIGEST_CHARS = 8
COMPILED = "compile"  # marks rows of kernels that a device compiled before the part: no figures
VENDOR = "nvidia "
COMMIT = re.compile(r"([0-9a-f]{7,12})[0-9a-f]{0,28}(-dirty)?")
Row = dict[str, Any]


class NoMeasurement(ValueError):
    """The folder has no rows of one card and one commit, or they are of a dry run."""


@dataclass(frozen=True)
class Run:
    """The rows of one run of the kit. `name` is <card>/<date>-<commit>."""

    name: str
    commit: str
    rows: list[Row]

    @property
    def card(self) -> str:
        return self.name.partition("/")[0]

    @property
    def date(self) -> str:
        """Returns the time of the last call, in ISO 8601."""
        return max(row["date"] for row in self.rows if row["part"] == KIT)


def whole_rows(path: Path) -> list[Row]:
    """Returns the rows of all whole lines. A process that is killed while it writes leaves a part
    of one, at the end or before another process's rows.
    """
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [row for line in whole.splitlines() if (row := _parsed(line)) is not None]


def _parsed(line: bytes) -> Row | None:
    try:
        row: Row = json.loads(line)
    except ValueError:
        return None
    return row


def measured_run(folder: Path, commit: str | None = None) -> Run:
    """Returns the run of a folder that the kit left. `commit` replaces an unknown one.

    Raises NoMeasurement.
    """
    rows = [row for row in whole_rows(folder / ROWS) if row.get("dry") != COMPILED]
    num_dry = sum("dry" in row for row in rows)
    if num_dry:
        raise NoMeasurement(f"{num_dry} of {len(rows)} rows in {folder} are of a dry run")
    cards = {row["card"] for row in rows if "card" in row}
    if len(cards) != 1:
        raise NoMeasurement(f"the rows in {folder} are of {len(cards)} cards, not of one")
    kit = next(row for row in rows if row["part"] == KIT)
    kit["commit"] = commit or kit["commit"]
    found = COMMIT.fullmatch(kit["commit"])
    if found is None:
        raise NoMeasurement(f"nobody can check out the commit {kit['commit']!r}: give --commit")
    summary = _summary(folder)
    kernels = kit.get("kernels") or summary.get("kernels", "unknown")
    dirty = f"{found[2]}-{kernels[:DIGEST_CHARS]}" if found[2] else ""
    commit, date = found[1] + dirty, kit["date"][:10]
    rows += _endings(summary.get("parts", []))
    return Run(f"{slug_of(cards.pop())}/{date}-{commit}", commit, rows)


def _summary(folder: Path) -> dict[str, Any]:
    """Returns an empty one if the kit was killed before it was written, or it was not brought."""
    path = folder / SUMMARY
    return json.loads(path.read_text()) if path.exists() else {}


def _endings(parts: Iterable[Row]) -> list[Row]:
    """Returns rows on how each part ended, from the kit's summary: a part that died wrote none."""
    return [
        {"part": each["part"], "case": ENDED, **{name: each[name] for name in ENDING}}
        for each in parts
    ]


def slug_of(card: str) -> str:
    """ "NVIDIA H100 80GB HBM3" -> "h100-80gb-hbm3"."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower().removeprefix(VENDOR)).strip("-")


def store(run: Run, results: Path) -> Run:
    """Adds the rows to those of other calls of the same commit. Returns the run of all."""
    path = results / run.name / ROWS
    before = whole_rows(path) if path.exists() else []
    lines = list(dict.fromkeys(json.dumps(row) for row in (*before, *run.rows)))  # NaN equals NaN
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(f"{line}\n" for line in lines))
    temporary.replace(path)
    return Run(run.name, run.commit, [json.loads(line) for line in lines])


def stored_runs(results: Path) -> list[Run]:
    """Returns the stored runs, from the oldest to the newest."""
    paths = results.glob(f"*/*/{ROWS}")
    runs = [_stored(path) for path in sorted(paths)]
    return sorted(runs, key=lambda run: run.date)


def newest(runs: Iterable[Run]) -> Run | None:
    return max(runs, key=lambda run: run.date, default=None)


def _stored(path: Path) -> Run:
    folder = path.parent
    name = f"{folder.parent.name}/{folder.name}"
    commit = folder.name[len("2026-12-31-") :]
    return Run(name, commit, whole_rows(path))
