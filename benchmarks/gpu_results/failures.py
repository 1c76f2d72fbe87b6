"""The failures that are known: `expected_failures.toml`, compared with those of a run.

    new      it failed in this run, and is not in the file: it is added, with the cause "unknown"
    still    it failed, and is in the file
    fixed    it is in the file, and passed in this run: it is removed

A failure is one card's: the same test may pass on another. A test that did not run stays. A part
that failed, or exceeded its deadline, is one if none of its cases is.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu_results.runs import ENDED, Row, Run

FILE = "expected_failures.toml"
UNKNOWN = "unknown"
FAILED = ("failed", "timed out")
RAN = ("ok", *FAILED)  # statuses of parts that ran
HEAD = (
    "# Failures on GPUs, by benchmarks/gpu_results: only the suspected cause is written by hand.\n"
)


@dataclass(frozen=True)
class Failure:
    """An expected failure. `first_run` is <card>/<date>-<commit>, `digest` that of the sources of
    the tested kernels.
    """

    test: str
    first_run: str
    commit: str
    digest: str
    suspected_cause: str

    @property
    def key(self) -> tuple[str, str]:
        return self.first_run.partition("/")[0], self.test


@dataclass(frozen=True)
class Outcome:
    has_failed: bool
    message: str
    digest: str


def outcomes(rows: Collection[Row]) -> dict[str, Outcome]:
    """Returns the outcomes of tests, and of the cases of other parts.

    The last row decides, as the fixture of a test that passed may fail.
    """
    found: dict[str, Outcome] = {}
    for row in rows:
        digest, case = row.get("sources", ""), f"{row['part']}: {row['case']}"
        if row.get("outcome") in ("passed", "failed"):
            has_failed = row["outcome"] == "failed"
            found[row["case"]] = Outcome(has_failed, row.get("message", ""), digest)
        elif "ok" in row:
            error = f"an error of {row.get('max_error')}"
            found[case] = Outcome(not row["ok"], error, digest)
        elif isinstance(row.get("raised"), str):
            found[case] = Outcome(True, row["raised"], digest)
    return found | _endings(rows, {test for test, each in found.items() if each.has_failed})


def _endings(rows: Iterable[Row], failed: Collection[str]) -> dict[str, Outcome]:
    """Returns the outcomes of parts, but for those with one of the failed cases."""
    parts = {test.partition(": ")[0] for test in failed}
    return {
        f"{row['part']}: {ENDED}": Outcome(row["status"] in FAILED, row["reason"], "")
        for row in rows
        if row["case"] == ENDED and _has_ended(row) and row["part"] not in parts
    }


def _has_ended(row: Row) -> bool:
    """Returns whether a part ran, and was not cut off by the end of its call."""
    is_cut = row["status"] == "timed out" and row["seconds"] < row.get("deadline_s", 0)
    return row["status"] in RAN and not is_cut


def compare(expected: list[Failure], run: Run) -> tuple[list[Failure], list[str]]:
    """Returns the failures that are expected from now on, and a line for each new,
    still and fixed one.
    """
    found, known = outcomes(run.rows), {each.key: each for each in expected}
    lines = []
    for test, outcome in found.items():
        before = known.get((run.card, test))
        if outcome.has_failed and before is None:
            new = Failure(test, run.name, run.commit, outcome.digest, UNKNOWN)
            known[new.key] = new
            lines.append(f"new    {test}: {outcome.message.partition(chr(10))[0]}")
        elif outcome.has_failed and before is not None:
            lines.append(f"still  {test}: since {before.first_run}, {before.suspected_cause}")
        elif before is not None:
            del known[before.key]
            lines.append(f"fixed  {test}: since {before.first_run}, {before.suspected_cause}")
    return list(known.values()), lines


def read(path: Path) -> list[Failure]:
    if not path.exists():
        return []
    return [Failure(**each) for each in tomllib.loads(path.read_text()).get("failure", [])]


def write(path: Path, failures: Iterable[Failure]) -> None:
    tables = []
    for each in sorted(failures, key=lambda failure: failure.key):
        # A string of JSON is one of TOML, too.
        pairs = (f"{name} = {json.dumps(value)}\n" for name, value in asdict(each).items())
        tables.append("\n[[failure]]\n" + "".join(pairs))
    path.write_text(HEAD + "".join(tables))
