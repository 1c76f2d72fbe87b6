"""Searches simulated traffic for data of tenants outside of their regions:
python -m tests.simulation.residency --help.

A thousand tenants are served at six linked sites in six regions by the real services on a virtual
clock, with the timing engine. In each run sites and links fail, regions of tenants change, and a
leak of each form is planted for the same search. The figures do not depend on the machine, but for
the time: a million requests take two to four hours of one core. With --shards each run
is a file: the command goes on where it was interrupted, several share a folder, and --sum adds up
what is there.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.report import Bar, Row, at_least, at_most, commit, print_tables, write_result
from tests.simulation.residency.canaries import search_of_all
from tests.simulation.residency.drawing import residency_plan_of
from tests.simulation.residency.plan import NUM_TENANTS, REGIONS
from tests.simulation.residency.planted import FORMS
from tests.simulation.residency.shards import Shards, ranges
from tests.simulation.residency.simulation import ResidencyOutcome, run_residency

REQUESTS_A_RUN = 4_000


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


def outcomes(
    num_requests: int, *, first: int, jobs: int, shards: Shards | None = None
) -> Iterator[ResidencyOutcome]:
    """Yields the outcome of each run, as soon as it is known and those before it are. With `shards`
    they are run one after another, each with REQUESTS_A_RUN.
    """
    num_runs = max(1, round(num_requests / REQUESTS_A_RUN))
    if shards is not None:
        yield from shards.run(range(first, first + num_runs), partial(outcome_of, REQUESTS_A_RUN))
        return
    run = partial(outcome_of, num_requests // num_runs)
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run, range(first, first + num_runs))


def row_of(total: ResidencyOutcome, wall_s: float) -> Row:
    return {
        "requests": total.num_requests,
        "runs": total.num_runs,
        "tenants": NUM_TENANTS,
        "regions": len(REGIONS),
        "finished": total.endings["finished"],
        "refused_by_region": total.endings["refused: no_region_allowed"],
        "over_links": total.num_crossed,
        "fingerprints_in_classes": total.num_of_classes,
        "resubmitted": total.events["request_resubmitted"],
        "faults": total.num_faults,
        "changes_of_regions": total.num_changes,
        "messages": total.num_messages,
        "searched_GB": round(total.num_bytes / 1e9, 2),
        "sightings": total.num_seen.total(),
        "leaks": total.leaks.total(),
        "planted": total.num_runs * len(FORMS),
        "planted_not_found": total.not_found.total(),
        "other_wrongs": total.wrongs.total(),
        **{f"refused_by_{check}": total.refusals[check] for check in sorted(total.refusals)},
        "virtual_s": round(total.virtual_s),
        "wall_s": round(wall_s),  # of this command
    }


def bars_of(row: Row, num_requests: int) -> list[Bar]:
    return [
        at_least("requests", row["requests"], num_requests, ""),
        at_most("leaks over a border", row["leaks"], 0, ""),
        at_most("planted leaks that are not found", row["planted_not_found"], 0, ""),
    ]


def main(argv: Sequence[str] = tuple(sys.argv[1:])) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS_A_RUN, help="of all runs together")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--shards", type=Path, help="the folder of the runs of this commit")
    parser.add_argument("--sum", action="store_true", help="run nothing: add up --shards")
    parser.add_argument("--write", action="store_true", help="write the result of a benchmark")
    given = parser.parse_args(argv)
    began, total, seeds = time.monotonic(), ResidencyOutcome(num_runs=0), list[int]()
    shards = None
    if given.shards is not None:
        shards = Shards(given.shards, commit(), REQUESTS_A_RUN)
    if not (shards and given.sum):
        for outcome in outcomes(given.requests, first=given.first, jobs=given.jobs, shards=shards):
            total.add(outcome)
            print(f"{total.num_requests}: {total.leaks.total()} leaks", file=sys.stderr, flush=True)
    if shards is not None:
        total, seeds = shards.total(), shards.seeds()
    row = row_of(total, time.monotonic() - began)
    if seeds:
        row["seeds"] = ranges(seeds)
    bars = bars_of(row, given.requests)
    rows: list[Row] = [{"what": name, "count": each} for name, each in row.items()]
    if given.write:
        command = ("-m", "tests.simulation.residency", *argv)
        write_result("tenant_regions", rows, bars, command)
    else:
        print_tables("tenant_regions", rows, bars)
    for each in (*sorted(total.examples)[:50], *sorted(total.wrongs)[:20]):
        print(f"  {each}")
    return int(bool(total.leaks or total.not_found or total.wrongs))


if __name__ == "__main__":
    sys.exit(main())
