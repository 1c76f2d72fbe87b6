"""Measures Hearth on this machine's GPU, without a network, in calls of a few minutes.

Each part runs in a separate process with a deadline: one that crashes or hangs affects no other
part. Measurements are written immediately; benchmarks/gpu_kit/outputs.py lists the files.

    ok            it completed
    failed        it raised, computed something wrong, or its process died
    timed out     the deadline passed first; its rows so far are kept
    unavailable   this machine lacks a device, a tool or a package that it needs
    not built     the feature that it measures does not exist yet
    not run       no time was left, or the device was found sick before it

    scripts/gpu_kit OUT [--call a|b|c|d | --only PART ...] [--dry-run]

A dry run needs no GPU: launches go to a fake driver.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.outputs import ROWS, Outputs, commit_of
from benchmarks.gpu_kit.part_process import Ended, PartProcess
from benchmarks.gpu_kit.parts import CALLS, HERE, NAMES, RESERVED_S, Part, parts_named
from benchmarks.gpu_kit.session import append_line, read_rows
from benchmarks.gpu_kit.sources import all_sources_digest

ROOT = Path(__file__).resolve().parents[2]
LEAST_S = 5  # a part with less time is not started
DRY_SLACK = 5  # the machine of a dry run may be busy
PROBE = Part("probe", 25, "whether the device still computes", f"{HERE}.probe", ("torch",))
COMPILE_S = 60  # limit for the kernels of one part, on all processors
CARRIED_S = 20  # limit to unpack kernels and compare the keys of both machines
KEPT = ("date", "commit", "kernels")  # of the summary in the kit's own row
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")


def main(argv: Sequence[str]) -> int:
    given = arguments(argv)
    names = tuple(given.only) or CALLS[given.call].parts
    budget_s = given.budget_s or CALLS[given.call].limit_s
    kit = Kit(Outputs(given.out), given.work, given.pack, is_dry=given.dry_run)
    summary = kit.run(parts_named(names), budget_s)
    return exit_status(summary["parts"])


def exit_status(parts: Sequence[dict[str, Any]]) -> int:
    return int(any(each["status"] in ("failed", "timed out") for each in parts))


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_kit", description="Measures Hearth on this machine's GPU."
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for this call's results")
    add = parser.add_argument
    limits = ", ".join(f"{name}: {call.limit_s} s" for name, call in CALLS.items())
    add("--call", choices=CALLS, default="a", help=f"parts to run, {limits} (default: a)")
    add("--only", nargs="+", choices=NAMES, default=[], metavar="PART", help=", ".join(NAMES))
    add("--dry-run", action="store_true", help="run without a GPU; nothing is computed")
    add("--budget-s", type=float, help="for all parts (default: the call's limit)")
    pack = "folder made by scripts/gpu_pack (default: %(default)s)"
    add("--pack", type=Path, default=ROOT / ".gpu_pack", help=pack)
    kept = "folder of compiled kernels for the next call (default: %(default)s)"
    add("--work", type=Path, default=_work(), help=kept)
    given = parser.parse_args(argv)
    for name in ("out", "pack", "work"):
        setattr(given, name, getattr(given, name).absolute())
    if (given.out / ROWS).exists() and (given.out / ROWS).stat().st_size:
        parser.error(f"{given.out} has the rows of another call: name a new folder")
    try:
        given.work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--work {given.work}: {error.strerror}")
    return given


def _work() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "hearth" / "gpu_kit"


class Kit:
    """The parts of the kit on this machine. `work` holds Triton's cache, and may be deleted between
    calls, which only costs time.
    """

    def __init__(
        self, outputs: Outputs, work: Path, pack: Path, *, is_dry: bool, probe: Part = PROBE
    ) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.outputs, self.is_dry, self.probe = outputs, is_dry, probe
        self.cache, self.pack = work / "triton_cache", pack
        self.card, self.driver = ("", "") if is_dry else _card()
        self.sick = ""  # why the device computes nothing any more
        self.is_matching = True  # whether the carried kernels are those of this machine

    def run(self, parts: Sequence[Part], budget_s: float) -> dict[str, Any]:
        """Returns the summary, which is rewritten after each part."""
        ends = time.monotonic() + budget_s - RESERVED_S
        summary: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit_of(ROOT),
            "kernels": all_sources_digest(),
            "python": platform.python_version(),
            "card": self.card,
            "driver": self.driver,
            "is_dry": self.is_dry,
            "parts": [],
            "predictions": [],
        }
        self.outputs.write_summary(summary)
        self._add_row("kit", case="run", **{name: summary[name] for name in KEPT})
        self._unpack()
        for part in parts:
            summary["parts"].append(self._report(part, ends))
            summary["predictions"] = self.outputs.predictions()
            self.outputs.write_summary(summary)
            print_table(summary["parts"])
        return summary

    def _report(self, part: Part, ends: float) -> dict[str, Any]:
        """Runs a part. Returns its entry in the summary."""
        started, num_rows = time.monotonic(), self.outputs.count_rows()
        status, reason = self._ending(part, ends)
        if status in ("failed", "timed out") and not self.is_dry:
            self._probe()
        return {
            "part": part.name,
            "status": status,
            "reason": reason,
            "answers": part.answers,
            "seconds": round(time.monotonic() - started, 1),
            "deadline_s": part.deadline_s,
            "num_rows": self.outputs.count_rows() - num_rows,
        }

    def _ending(self, part: Part, ends: float) -> Ended:
        if self.sick:
            return "not run", f"the device is sick: {self.sick}"
        if not self.is_matching and "triton" in part.needs:
            left_s = max(0.0, ends - time.monotonic())
            self._process(part, "compile").run(min(COMPILE_S, left_s))
        left_s = ends - time.monotonic()
        if left_s < LEAST_S:
            return "not run", "no time left"
        limit_s = part.deadline_s * (DRY_SLACK if self.is_dry else 1)
        print(f"gpu_kit: {part.name}, at most {limit_s} s: {part.answers}", flush=True)
        return self._process(part, "dry" if self.is_dry else "device").run(min(limit_s, left_s))

    def _process(self, part: Part, mode: str) -> PartProcess:
        environ = {
            "TRITON_CACHE_DIR": str(self.cache),
            "HEARTH_KIT_CARD": self.card,
            "HEARTH_KIT_DRIVER": self.driver,
        }
        return PartProcess(part, mode, self.outputs, environ)

    def _probe(self) -> None:
        """Probes the device after a failure: one that computes nothing must not fail the rest in
        silence.
        """
        status, reason = self._process(self.probe, "device").run(self.probe.deadline_s)
        if status in ("failed", "timed out"):
            self.sick = reason
            self._add_row(self.probe.name, case="probe", is_sick=True, reason=reason)

    def _unpack(self) -> None:
        """Fills Triton's cache from the pack. Without kernels of this machine's keys each part's
        are compiled before it, by all processors: fewer parts have time to run.
        """
        carried = Part(
            "carried",
            CARRIED_S,
            "kernels compiled elsewhere",
            f"{HERE}.compiled.carried",
            (),
            (str(self.pack),),  # needs Triton only where kernels were carried
        )
        status, reason = self._process(carried, "dry" if self.is_dry else "device").run(CARRIED_S)
        rows = [row for row in read_rows(self.outputs.rows) if row["case"] == "carried kernels"]
        found = rows[0]["differences"] if rows else [reason or status]
        self.is_matching = self.is_dry or not found
        print("\n".join(f"gpu_kit: carried kernels: {each}" for each in found or ["found"]))

    def _add_row(self, part: str, **row: Any) -> None:
        dry = {"dry": "dry"} if self.is_dry else {}
        of_device = {"card": self.card, "driver": self.driver} if self.card else {}
        line = json.dumps({"part": part, **dry, **of_device, **row})
        append_line(self.outputs.rows, line + "\n")


def _card() -> tuple[str, str]:
    """Returns the name and driver of the first device; empty where they are unknown."""
    if shutil.which(NVIDIA_SMI[0]) is None:
        return "", ""
    found = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, check=False, timeout=20)
    first = found.stdout.strip().partition("\n")[0]
    name, _, driver = first.partition(", ")
    return name, driver


def print_table(parts: Sequence[dict[str, Any]]) -> None:
    for each in parts:
        took = f"{each['seconds']:6.1f} s {each['num_rows']:4d} rows"
        print(f"{each['part']:18}{each['status']:12}{took}  {each['reason']}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
