"""Runs many schedules on several processes: python -m tests.simulation.sweep --help."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from math import inf

from tests.simulation.drawing import plan_of
from tests.simulation.saved import save
from tests.simulation.simulation import Outcome, run_plan
from tests.simulation.tally import Tally
from tests.simulation.variants import VARIANTS

CHUNK = 25  # schedules that a process runs between two reports


def run_seeds(seeds: Iterable[int], variant: str = "drawn") -> Tally:
    """Runs seeds in sequence; garbage collection skips objects that existed before."""
    tally, began = Tally(), time.process_time()
    gc.disable()
    gc.freeze()
    try:
        for seed in seeds:
            plan = VARIANTS[variant](plan_of(seed))
            tally.record(plan, run_plan(plan))
    finally:
        gc.unfreeze()
        gc.enable()
    tally.cpu_s = time.process_time() - began
    return tally


def sweep(first: int, count: int, num_jobs: int, variant: str = "drawn") -> Iterator[Tally]:
    """A tally of each chunk, in the order of the seeds."""
    stop = first + count
    chunks = [range(start, min(start + CHUNK, stop)) for start in range(first, stop, CHUNK)]
    if num_jobs == 1:
        yield from map(run_seeds, chunks, repeat(variant))
        return
    with ProcessPoolExecutor(num_jobs) as pool:
        try:
            yield from pool.map(run_seeds, chunks, repeat(variant))
        finally:
            pool.shutdown(cancel_futures=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--variant", choices=VARIANTS, default="drawn", help="see variants.py")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=inf, help="stop after so long")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/simulation")
    parser.add_argument("--add", action="store_true", help="to the pieces that are saved there")
    given = parser.parse_args(argv)
    if given.seeds < 1 or given.jobs < 1:
        parser.error("--seeds and --jobs are at least 1")
    began, total = time.monotonic(), Tally()
    for tally in sweep(given.first, given.seeds, given.jobs, given.variant):
        total.add(tally)
        for outcome in tally.failed:
            print(report_of(outcome, given.variant), flush=True)
        if total.num_schedules % (40 * CHUNK) == 0:
            print(f"{total.num_schedules} schedules, {len(total.failed)} failed", flush=True)
        if time.monotonic() - began > 60 * given.minutes:
            break
    took_s = time.monotonic() - began
    if given.save:
        save(total, given.first, took_s, argv, is_added=given.add)
    else:
        print(f"{total.num_schedules} schedules in {took_s:.1f} s, {len(total.failed)} failed")
        print(f"requests: {dict(total.endings)}")
        print(f"faults: {dict(total.faults)}")
    return 1 if total.failed else 0


def report_of(outcome: Outcome, variant: str = "drawn") -> str:
    lines = "".join(f"\n    {wrong[:1000]}" for wrong in outcome.wrongs)
    return (
        f"seed {outcome.seed} fails; replay it by\n    {outcome.replay} --variant {variant}{lines}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
