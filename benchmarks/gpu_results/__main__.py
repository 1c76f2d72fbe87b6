"""Adds a run of the GPU kit to the committed results: `scripts/gpu_results OUT`.

Copies the rows to benchmarks/results/gpu/<card>/<date>-<commit>, updates shared/engine/modes.json
and the table in benchmarks/README.md, and prints a line for each failure that is new, still there
or fixed, and for each operation whose bits changed. Rows of a dry run are refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_results import digests, failures, modes, runs
from benchmarks.gpu_results.runs import ROOT, NoMeasurement, measured_run
from benchmarks.gpu_results.table import gpu_tables
from benchmarks.readme_table import GPU, replaced


def main(argv: Sequence[str]) -> int:
    """Returns 2 if the rows are refused."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_results", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("run", type=Path, metavar="OUT", help="folder that scripts/gpu_kit wrote")
    parser.add_argument("--commit", help="of the checkout that ran (default: the summary's)")
    given = parser.parse_args(argv)
    try:
        lines = add_run(given.run, given.commit)
    except NoMeasurement as error:
        print(f"gpu_results: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def add_run(folder: Path, commit: str | None = None, *, root: Path = ROOT) -> list[str]:
    """Returns the lines to print. Raises NoMeasurement before anything is written."""
    measured = measured_run(folder, commit)
    results = root / runs.RESULTS
    run = runs.store(measured, results)
    modes.update(modes.measured_modes(run.rows), root / modes.PATH)
    readme = root / "benchmarks" / "README.md"
    readme.write_text(replaced(readme.read_text(), GPU, gpu_tables(results)))
    path = results / failures.FILE
    expected, lines = failures.compare(failures.read(path), measured)
    failures.write(path, expected)
    copied = f"{len(measured.rows)} rows are now in {runs.RESULTS / run.name}"
    return [copied, *lines, *digests.changes(run, runs.stored_runs(results))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
