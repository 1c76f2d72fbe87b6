"""The whole matrix: `scripts/chaos`; a part of it: `scripts/chaos --victim decode-1 --fault kill`.

Prints a line a row; the whole is saved as benchmarks/results/chaos.json. The exit status is 1 if a
row lost or altered an answer or left something behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from benchmarks.report import Bar, at_most, write_result
from tests.chaos.cluster import ChaosCluster
from tests.chaos.monitor import Monitor
from tests.chaos.rows import PHASES, VICTIMS, Chaos, Fault, Phase, Row, run_row

TIMING_STEP_S = 0.015
WORKERS = {"kv-cache-bytes": str(2048 * 256), "max-batch-tokens": "256"}
# A worker may hold so few prompts at once that most requests wait for their turn.
FEW_RESERVATIONS = {**WORKERS, "max-reserved-share": "0.04"}
LEARNED_WITHOUT = ("decode-1", "prefill-1")
FAULTS: tuple[Fault, ...] = ("kill", "freeze")
MAX_DETECT_S = {"kill": 0.5, "freeze": 1.5}
MAX_EXCESS_S = {"kill": 1.0, "freeze": 2.0}


def main() -> int:
    options = _options()
    rows, leftovers = asyncio.run(_matrix(options))
    for name, held in leftovers.items():
        print(f"{name} still holds {held}")
    bars = _bars(rows, leftovers)
    name = "chaos-demo-model" if options.demo_model else "chaos"
    argv = ["-m", "tests.chaos", *sys.argv[1:]]
    if not (options.victim or options.fault or options.phase):
        write_result(name, [msgspec.to_builtins(row) for row in rows], bars, argv)
    return int(any(row.is_bad for row in rows) or bool(leftovers))


def _bars(rows: list[Row], leftovers: dict[str, dict[str, int]]) -> list[Bar]:
    bars = []
    for fault in FAULTS:
        of_fault = [row for row in rows if row.fault == fault]
        detect_s = [row.detect_s for row in of_fault if row.detect_s is not None]
        excess_s = [row.excess_s - (row.outage_s or 0.0) for row in of_fault]
        if of_fault:
            name = f"{fault}: fault to resubmission"
            bars.append(at_most(name, max(detect_s, default=0.0), MAX_DETECT_S[fault], "s"))
            name = f"{fault}: pause less recomputation and outage"
            bars.append(at_most(name, max(excess_s), MAX_EXCESS_S[fault], "s"))
    bars.append(at_most("lost", sum(row.lost for row in rows), 0, "requests"))
    bars.append(at_most("altered", sum(row.altered for row in rows), 0, "answers"))
    leaking = sum(row.whole_after_s is None for row in rows)
    bars.append(at_most("pools that are not whole afterwards", leaking, 0, "rows"))
    bars.append(at_most("processes that still hold something", len(leftovers), 0, "processes"))
    return bars


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description="The matrix of faults.")
    parser.add_argument("--victim", action="append", choices=VICTIMS)
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--phase", action="append", choices=PHASES)
    parser.add_argument("--demo-model", action="store_true", help="instead of the timing engine")
    parser.add_argument("--keep-logs", action="store_true")
    return parser.parse_args()


async def _matrix(options: argparse.Namespace) -> tuple[list[Row], dict[str, dict[str, int]]]:
    """The rows, and what each process still held after the last one."""
    rows: list[Row] = []
    leftovers: dict[str, dict[str, int]] = {}
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
                        rows.append(row)
            leftovers |= await running.leftovers()
    return rows, leftovers


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
