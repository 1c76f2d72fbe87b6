"""Runs parts of the kit dry, each in a fork of one process that has imported torch and Triton.

    python -m tests.benchmarks.gpu_kit.dry_parts ROWS [PART ...]
    python -m tests.benchmarks.gpu_kit.dry_parts --write   records launches.json

Packages that a bare machine lacks are hidden. Exits with the number of parts that did not end well.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.parts import NAMES, Part, parts_named
from benchmarks.gpu_kit.session import Session, read_rows
from tests.benchmarks.gpu_kit.hidden_modules import hide

FILE = Path(__file__).with_name("launches.json")


def run_part(part: Part, rows: Path) -> bool:
    """In a child process, which leaves at once: nothing of this process is flushed twice."""
    child = os.fork()
    if child == 0:
        from benchmarks.gpu_kit.child import run

        try:
            session = Session(part.name, rows, mode="dry")
            ending = run(session, part.module, part.arguments, part.needs)
            print(f"{part.name}: {', '.join(filter(None, ending))}", flush=True)
            os._exit(ending[0] != "ok")
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def run_parts(names: tuple[str, ...], rows: Path) -> int:
    """Returns how many parts did not end well."""
    hide()
    import benchmarks.gpu_kit.dry.dry_device  # noqa: F401  # forks have it

    rows.touch()
    return sum(not run_part(part, rows) for part in parts_named(names))


def launches_in(rows: Path) -> dict[str, dict[str, int]]:
    """Part -> kernel -> launches."""
    found: list[dict[str, Any]] = read_rows(rows)
    return {row["part"]: row["by_kernel"] for row in found if row["case"] == "launches"}


def main(arguments: list[str]) -> int:
    if arguments != ["--write"]:
        return run_parts(tuple(arguments[1:]) or NAMES, Path(arguments[0]))
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        num_failed = run_parts(NAMES, rows)
        FILE.write_text(json.dumps(launches_in(rows), indent=1) + "\n")
    return num_failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
