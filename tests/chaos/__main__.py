"""The whole matrix: `scripts/chaos`; a part of it: `scripts/chaos --victim decode-1 --fault kill`.

Prints a line a row. The whole has 10,000 clients that leave early and a rolling restart as well,
and is saved as benchmarks/results/chaos.json. The exit status is 1 if an answer was lost or altered
or something was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.report import Bar, at_most, write_result
from tests.chaos.chaos import Chaos
from tests.chaos.cluster import ChaosCluster
from tests.chaos.load import Steady, leave_early
from tests.chaos.logs import suspicions
from tests.chaos.monitor import Monitor
from tests.chaos.phases import PHASES, Phase
from tests.chaos.restarts import restart_each
from tests.chaos.rows import VICTIMS, Fault, Row, run_row

TIMING_STEP_S = 0.015
WORKERS = {"kv-cache-bytes": str(2048 * 256), "max-batch-tokens": "256"}
# A worker may hold so few prompts at once that most requests wait for their turn.
FEW_RESERVATIONS = {**WORKERS, "max-reserved-share": "0.04"}
LEARNED_WITHOUT = ("decode-1", "prefill-1")
NUM_LEAVING = 10_000
FAULTS: tuple[Fault, ...] = ("kill", "freeze")
MAX_DETECT_S = {"kill": 0.5, "freeze": 1.5}
MAX_EXCESS_S = {"kill": 1.0, "freeze": 2.0}


@dataclass
class Outcome:
    """All that was found."""

    rows: list[Row] = field(default_factory=list)
    leftovers: dict[str, dict[str, int]] = field(default_factory=dict)  # by process
    num_restarted: int = 0
    num_unclean: int = 0  # processes that did not end by themselves, with status 0
    longest_drain_s: float = 0.0
    failed_in_restart: int = 0  # of the requests that were asked meanwhile

    @property
    def is_bad(self) -> bool:
        has_bad_row = any(row.is_bad for row in self.rows)
        return has_bad_row or bool(self.leftovers or self.num_unclean or self.failed_in_restart)


def main() -> int:
    options = _options()
    if options.soak_minutes:
        return asyncio.run(_soak(options))
    outcome = asyncio.run(_matrix(options))
    for name, held in outcome.leftovers.items():
        print(f"{name} still holds {held}")
    if options.is_whole:
        name = "chaos-demo-model" if options.demo_model else "chaos"
        rows = [msgspec.to_builtins(row) for row in outcome.rows]
        write_result(name, rows, _bars(outcome), ["-m", "tests.chaos", *sys.argv[1:]])
    return int(outcome.is_bad)


def _bars(outcome: Outcome) -> list[Bar]:
    rows, bars = outcome.rows, []
    for fault in FAULTS:
        of_fault = [row for row in rows if row.fault == fault]
        detect_s = [row.detect_s for row in of_fault if row.detect_s is not None]
        excess_s = [row.excess_s - (row.outage_s or 0.0) for row in of_fault]
        name = f"{fault}: fault to resubmission"
        bars.append(at_most(name, max(detect_s), MAX_DETECT_S[fault], "s"))
        name = f"{fault}: pause less recomputation and outage"
        bars.append(at_most(name, max(excess_s), MAX_EXCESS_S[fault], "s"))
    bars.append(at_most("lost", sum(row.lost for row in rows), 0, "requests"))
    bars.append(at_most("altered", sum(row.altered for row in rows), 0, "answers"))
    suspected = sum(row.suspected for row in rows)
    bars.append(at_most("suspicions of who had nothing done to it", suspected, 0, "suspicions"))
    leaking = sum(row.whole_after_s is None for row in rows)
    bars.append(at_most("pools that are not whole afterwards", leaking, 0, "rows"))
    name = f"still held after all rows and {NUM_LEAVING} cancels"
    bars.append(at_most(name, len(outcome.leftovers), 0, "processes"))
    name = f"rolling restart of {outcome.num_restarted} processes under load"
    bars.append(at_most(name, outcome.failed_in_restart, 0, "failed requests"))
    bars.append(at_most("unclean ends", outcome.num_unclean, 0, "processes"))
    bars.append(at_most("longest drain", outcome.longest_drain_s, 10.0, "s"))
    return bars


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description="The matrix of faults.")
    parser.add_argument("--victim", action="append", choices=VICTIMS)
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--phase", action="append", choices=PHASES)
    parser.add_argument("--demo-model", action="store_true", help="instead of the timing engine")
    about = "no faults: a steady load, and whether anybody suspects anybody"
    parser.add_argument("--soak-minutes", type=float, metavar="N", help=about)
    parser.add_argument("--keep-logs", action="store_true")
    options = parser.parse_args()
    options.is_whole = not (options.victim or options.fault or options.phase)
    return options


async def _matrix(options: argparse.Namespace) -> Outcome:
    outcome = Outcome()
    phases: list[Phase] = options.phase or list(PHASES)
    for is_queued in (False, True):
        wanted = [phase for phase in phases if (phase == "queued") == is_queued]
        if not wanted:
            continue
        async with chaos(options, FEW_RESERVATIONS if is_queued else WORKERS) as running:
            for victim in options.victim or VICTIMS:
                for fault in options.fault or FAULTS:
                    for phase in wanted:
                        row = await run_row(running, fault, victim, phase)
                        print(row, flush=True)
                        outcome.rows.append(row)
            if options.is_whole and not is_queued:
                await leave_early(running, NUM_LEAVING)
                await running.wait_until_whole()
            outcome.leftovers |= await running.leftovers()
            if options.is_whole and not is_queued:
                await _restart_all(running, outcome)
    return outcome


async def _restart_all(running: Chaos, outcome: Outcome) -> None:
    restarts, load = await restart_each(running, [*running.cluster.services])
    for each in restarts:
        print(each, flush=True)
    outcome.num_restarted = len(restarts)
    outcome.num_unclean = sum(each.exit_status != 0 for each in restarts)
    outcome.longest_drain_s = max(each.drain_s for each in restarts)
    outcome.failed_in_restart = len(load.failed)
    print(f"{len(load.asked)} requests meanwhile, {load.num_refused} tries refused", flush=True)


async def _soak(options: argparse.Namespace) -> int:
    async with chaos(options, WORKERS) as running:
        started = time.time()
        async with Steady(running) as load:
            await asyncio.sleep(60 * options.soak_minutes)
        suspected = suspicions(running.cluster, None, started)
        print(f"{len(load.asked)} requests, {len(load.failed)} failed, {load.num_refused} refused")
        print(f"{len(suspected)} suspicions", *suspected, sep="\n")
        return int(bool(load.failed or suspected))


@contextlib.asynccontextmanager
async def chaos(options: argparse.Namespace, workers: dict[str, str]) -> AsyncIterator[Chaos]:
    folder = Path(tempfile.mkdtemp(prefix="hearth-chaos-"))
    if options.keep_logs:
        print(f"logs: {folder}", flush=True)
    async with running_chaos(folder, workers, is_model=options.demo_model) as running:
        for worker in LEARNED_WITHOUT:
            await running.learn_without(worker)
        yield running


@contextlib.asynccontextmanager
async def running_chaos(
    folder: Path, workers: dict[str, str] = WORKERS, *, is_model: bool = False
) -> AsyncIterator[Chaos]:
    """A cluster under watch that has learned what its answers are undisturbed."""
    cluster, monitor = ChaosCluster(folder, step_s=TIMING_STEP_S, worker_options=workers), Monitor()
    if is_model:
        cluster = ChaosCluster(folder, step_s=None)
    try:
        await cluster.start()
        await monitor.start(cluster)
        running = Chaos(cluster, monitor)
        await running.learn()
        yield running
        await monitor.stop()
    finally:
        cluster.stop()


if __name__ == "__main__":
    sys.exit(main())
