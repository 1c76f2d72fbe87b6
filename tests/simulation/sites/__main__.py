"""Runs many schedules of linked sites: python -m tests.simulation.sites --help."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.sites.simulation import SitesOutcome, simulate_sites


def simulated(seed: int) -> SitesOutcome:
    gc.freeze()
    gc.disable()
    try:
        return simulate_sites(seed)
    finally:
        gc.enable()
        gc.unfreeze()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    if given.seeds < 1 or given.jobs < 1:
        parser.error("--seeds and --jobs are at least 1")
    began, endings, num_failed, num_crossed = time.monotonic(), Counter[str](), 0, 0
    num_lied_to = 0
    with ProcessPoolExecutor(given.jobs) as pool:
        seeds = range(given.first, given.first + given.seeds)
        for outcome in pool.map(simulated, seeds, chunksize=5):
            endings += outcome.endings
            num_crossed += outcome.num_crossed
            num_lied_to += outcome.num_lied_to
            if outcome.wrongs:
                num_failed += 1
                print(report_of(outcome), flush=True)
    print(f"{given.seeds} schedules in {time.monotonic() - began:.1f} s, {num_failed} failed")
    print(f"requests: {dict(endings)}")
    print(f"sent over links: {num_crossed}, of which to a site that lies: {num_lied_to}")
    return int(num_failed > 0)


def report_of(outcome: SitesOutcome) -> str:
    lines = "".join(f"\n    {wrong[:1000]}" for wrong in outcome.wrongs)
    return f"seed {outcome.seed} fails; replay it by\n    {outcome.replay}{lines}"


if __name__ == "__main__":
    sys.exit(main())
