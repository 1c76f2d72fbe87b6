"""Searches simulated traffic for data of tenants outside of their regions:
python -m tests.simulation.residency --help.

Each run has the same thousand tenants at six sites, other faults, other changes of regions.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.simulation.residency.canaries import search_of_all
from tests.simulation.residency.drawing import residency_plan_of
from tests.simulation.residency.simulation import ResidencyOutcome, run_residency

REQUESTS_A_RUN = 10_000


def outcome_of(num_requests: int, seed: int) -> ResidencyOutcome:
    search_of_all()
    gc.freeze()
    gc.disable()
    try:
        return run_residency(residency_plan_of(seed, num_requests))
    finally:
        gc.enable()
        gc.unfreeze()
        gc.collect()


def outcomes(num_requests: int, *, first: int, jobs: int) -> Iterator[ResidencyOutcome]:
    """Yields the outcome of each run, as soon as it is known and those before it are."""
    num_runs = max(1, round(num_requests / REQUESTS_A_RUN))
    run = partial(outcome_of, num_requests // num_runs)
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run, range(first, first + num_runs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS_A_RUN, help="of all runs together")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    began, total = time.monotonic(), ResidencyOutcome(num_runs=0)
    for outcome in outcomes(given.requests, first=given.first, jobs=given.jobs):
        total.add(outcome)
        print(f"{total.num_requests} requests, {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(f"{total.num_requests} requests in {total.num_runs} runs: {dict(total.endings)}")
    print(f"sent over links: {total.num_crossed}; messages: {total.num_messages}")
    print(f"searched: {total.num_bytes / 1e9:.2f} GB; sightings: {dict(total.num_seen)}")
    for name, found in (("leaks", total.leaks), ("planted and not found", total.not_found)):
        print(f"{name}: {dict(found) or 'none'}")
    for each in (*sorted(total.examples)[:50], *total.wrongs):
        print(f"  {each}")
    return int(bool(total.leaks or total.not_found or total.wrongs))


if __name__ == "__main__":
    sys.exit(main())
