"""Measures Hearth on this machine's GPU: `scripts/gpu_kit OUT`, at most 540 s, no network.

Each part runs in a separate process with a deadline: one that crashes or hangs affects no other
part. Measurements are written immediately; benchmarks/gpu_kit/outputs.py lists the files.

    ok            it completed
    failed        it raised, or its process died
    timed out     the deadline passed first; its rows so far are kept
    unavailable   this machine lacks a device, a tool or a package that it needs
    not built     the feature that it measures does not exist yet

    scripts/gpu_kit OUT [--only PART ...] [--dry-run]

A dry run needs no GPU: launches go to a fake driver.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.outputs import Outputs, code_identity
from benchmarks.gpu_kit.parts import BUDGET_S, PARTS, Part
from benchmarks.gpu_kit.process import GRACE_S, run

ROOT = Path(__file__).resolve().parents[2]
RESERVED_S = 15  # to pack the cache, and for the end of the last part
LEAST_S = 5  # a part with less time is not started
DRY_SLACK = 5  # the machine of a dry run may be busy
NAMES = [part.name for part in PARTS]


def main(argv: Sequence[str]) -> int:
    given = arguments(argv)
    parts = [part for part in PARTS if part.name in (given.only or NAMES)]
    outputs = Outputs(given.out, given.work)
    found = run_kit(parts, outputs, budget_s=given.budget_s, is_dry=given.dry_run)
    print_table(found["parts"])
    return int(any(each["status"] == "failed" for each in found["parts"]))


def run_kit(
    parts: Sequence[Part], outputs: Outputs, *, budget_s: float, is_dry: bool
) -> dict[str, Any]:
    """Returns the summary, which is rewritten after each part."""
    ends = time.monotonic() + budget_s - RESERVED_S
    summary: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **code_identity(ROOT),
        "python": platform.python_version(),
        "is_dry": is_dry,
        "is_warm": outputs.unpack_cache(),
        "parts": [],
        "predictions": [],
    }
    outputs.write_summary(summary)
    for part in parts:
        summary["parts"].append(_report(part, outputs, ends, is_dry=is_dry))
        summary["predictions"] = outputs.predictions()
        outputs.write_summary(summary)
    outputs.pack_cache()
    return summary


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_kit", description="Measures Hearth on this machine's GPU."
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the results")
    add = parser.add_argument
    add("--only", nargs="+", choices=NAMES, default=[], metavar="PART", help=", ".join(NAMES))
    add("--dry-run", action="store_true", help="run without a GPU; nothing is computed")
    add("--budget-s", type=float, default=BUDGET_S, help="for all parts (default: %(default)s)")
    kept = "folder of compiled kernels for the next run (default: %(default)s)"
    add("--work", type=Path, default=_work(), help=kept)
    given = parser.parse_args(argv)
    given.out = given.out.absolute()
    given.work = given.work.absolute()
    return given


def _work() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "hearth" / "gpu_kit"


def _report(part: Part, outputs: Outputs, ends: float, *, is_dry: bool) -> dict[str, Any]:
    """Runs a part. Returns its entry in the summary."""
    left_s = ends - time.monotonic() - GRACE_S
    started, num_rows = time.monotonic(), outputs.count_rows()
    if not part.module:
        status, reason = "not built", f"no {part.name} to measure"
    elif left_s < LEAST_S:
        status, reason = "timed out", "no time left"
    else:
        deadline_s = part.deadline_s * (DRY_SLACK if is_dry else 1)
        status, reason = _run(part, outputs, min(deadline_s, left_s), is_dry=is_dry)
    return {
        "part": part.name,
        "status": status,
        "reason": reason,
        "answers": part.answers,
        "seconds": round(time.monotonic() - started, 1),
        "deadline_s": part.deadline_s,
        "num_rows": outputs.count_rows() - num_rows,
    }


def _run(part: Part, outputs: Outputs, left_s: float, *, is_dry: bool) -> tuple[str, str]:
    print(f"gpu_kit: {part.name}, at most {left_s:.0f} s: {part.answers}", flush=True)
    log_start = outputs.log.stat().st_size
    with tempfile.TemporaryDirectory() as folder:
        ending = Path(folder) / "ending.json"
        command = [sys.executable, "-m", "benchmarks.gpu_kit.child", part.module, *part.arguments]
        command += ["--part", part.name, "--needs", *part.needs]
        command += ["--rows", str(outputs.rows), "--ending", str(ending)]
        command += ["--seconds", str(left_s)]
        status = run(
            command + ["--dry-run"] * is_dry,
            deadline_s=left_s,
            log=outputs.log,
            environ=_environ(outputs),
            cwd=ROOT,
        )
        outputs.shorten_log(log_start)
        if ending.exists():
            found = json.loads(ending.read_text())
            return found["status"], found["reason"]
    if status is None:
        return "timed out", f"after {left_s:.0f} s"
    return "failed", f"its process ended with status {status}"


def _environ(outputs: Outputs) -> dict[str, str]:
    """Existing paths remain: PYTHONPATH may be needed to find packages."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": str(outputs.cache),
        "HF_HUB_OFFLINE": "1",
    }


def print_table(parts: Sequence[dict[str, Any]]) -> None:
    for each in parts:
        took = f"{each['seconds']:6.1f} s {each['num_rows']:4d} rows"
        print(f"{each['part']:18}{each['status']:12}{took}  {each['reason']}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
