"""Runs many schedules on several processes: python -m tests.simulation.sweep --help."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from math import inf

from tests.simulation.drawing import plan_of
from tests.simulation.simulation import Outcome, run_plan

CHUNK = 25  # schedules that a process runs between two reports


@dataclass
class Tally:
    num_schedules: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    endings: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[Outcome] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.num_schedules += other.num_schedules
        self.virtual_s += other.virtual_s
        self.cpu_s += other.cpu_s
        self.endings += other.endings
        self.faults += other.faults
        self.failed += other.failed


def run_seeds(seeds: Iterable[int]) -> Tally:
    """One after the other; what is no garbage from before is not looked at after each."""
    tally, began = Tally(), time.process_time()
    gc.disable()
    gc.freeze()
    try:
        for seed in seeds:
            plan = plan_of(seed)
            outcome = run_plan(plan)
            tally.num_schedules += 1
            tally.virtual_s += outcome.virtual_s
            tally.endings += outcome.endings
            tally.faults.update(fault.kind for fault in plan.faults)
            if outcome.wrongs:
                tally.failed.append(outcome)
    finally:
        gc.unfreeze()
        gc.enable()
    tally.cpu_s = time.process_time() - began
    return tally


def sweep(first: int, count: int, num_jobs: int) -> Iterator[Tally]:
    """A tally of each chunk, in the order of the seeds."""
    stop = first + count
    chunks = [range(start, min(start + CHUNK, stop)) for start in range(first, stop, CHUNK)]
    if num_jobs == 1:
        yield from map(run_seeds, chunks)
        return
    with ProcessPoolExecutor(num_jobs) as pool:
        try:
            yield from pool.map(run_seeds, chunks)
        finally:
            pool.shutdown(cancel_futures=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=inf, help="stop after so long")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/simulation")
    parser.add_argument("--add", action="store_true", help="to the pieces that are saved there")
    given = parser.parse_args(argv)
    began, total = time.monotonic(), Tally()
    for tally in sweep(given.first, given.seeds, given.jobs):
        total.add(tally)
        for outcome in tally.failed:
            print(report_of(outcome), flush=True)
        if total.num_schedules % (40 * CHUNK) == 0:
            print(f"{total.num_schedules} schedules, {len(total.failed)} failed", flush=True)
        if time.monotonic() - began > 60 * given.minutes:
            break
    took_s = time.monotonic() - began
    if given.save:
        _save(total, given.first, took_s, argv, is_added=given.add)
    else:
        print(f"{total.num_schedules} schedules in {took_s:.1f} s, {len(total.failed)} failed")
        print(f"requests: {dict(total.endings)}")
        print(f"faults: {dict(total.faults)}")
    return 1 if total.failed else 0


def report_of(outcome: Outcome) -> str:
    lines = "".join(f"\n    {wrong[:1000]}" for wrong in outcome.wrongs)
    return f"seed {outcome.seed} fails; replay it by\n    {outcome.replay}{lines}"


def _save(total: Tally, first: int, took_s: float, argv: list[str], *, is_added: bool) -> None:
    """With `is_added` the pieces that were saved before stay, and all are summed up."""
    from benchmarks.report import RESULTS, at_most, commit, write_result

    path = RESULTS / "simulation.json"
    saved = json.loads(path.read_bytes())["rows"] if is_added and path.exists() else []
    pieces = [row for row in saved if "commit" in row]
    pieces.append(
        {
            "seeds": f"{first}-{first + total.num_schedules - 1}",
            "schedules": total.num_schedules,
            "failed": len(total.failed),
            "virtual_hours": round(total.virtual_s / 3600, 2),
            "cpu_s": round(total.cpu_s, 1),
            "wall_s": round(took_s, 1),
            "commit": commit(),
        }
    )
    summed = ("schedules", "failed", "virtual_hours", "cpu_s", "wall_s")
    whole = {"seeds": "all"} | {name: round(sum(p[name] for p in pieces), 2) for name in summed}
    for row in saved:
        total.endings[row.get("requests", "")] += row.get("count", 0)
        total.faults[row.get("faults", "")] += row.get("count", 0)
    rows = [
        *pieces,
        whole,
        *({"requests": name, "count": n} for name, n in total.endings.most_common() if name),
        *({"faults": name, "count": n} for name, n in total.faults.most_common() if name),
    ]
    bars = [at_most("schedules that failed", whole["failed"], 0, "schedules")]
    write_result("simulation", rows, bars, ["-m", "tests.simulation.sweep", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
