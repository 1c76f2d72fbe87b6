"""The full fault matrix: `scripts/chaos`; a part: `scripts/chaos --victim decode-1 --fault kill`.

Prints one line per row. The full matrix also has 10,000 clients that leave early and a rolling
restart, and is saved as benchmarks/results/chaos.json. The exit status is 1 if a response was lost
or altered or something was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from benchmarks.report import RESULTS, Bar, at_most, write_result
from tests.chaos.chaos import Chaos
from tests.chaos.checks.logs import suspicions
from tests.chaos.checks.phases import IMAGE_PHASES, PHASES, Phase
from tests.chaos.frames import run_frames
from tests.chaos.hosts.matrix import run_hosts
from tests.chaos.outcome import FAULTS, Outcome, bars_of
from tests.chaos.restarts import restart_each
from tests.chaos.rows import IMAGE_VICTIMS, RANK_VICTIMS, VICTIMS, can_befall, run_row
from tests.chaos.running import WORKERS, running_chaos, running_frames
from tests.chaos.sites.cuts import cut_bars, run_cuts
from tests.chaos.sites.faults import FAULTS as SITE_FAULTS
from tests.chaos.sites.matrix import run_sites
from tests.chaos.sites.picture import svg_of
from tests.chaos.world.load import Steady, leave_early
from tests.chaos.world.relay import TRANSPORTS
from tests.chaos.world.spoiling import SPOILINGS

# A worker may reserve so few blocks that most requests wait for their turn.
FEW_RESERVATIONS = {**WORKERS, "max-reserved-share": "0.04"}
LEARNED_WITHOUT = ("decode-1", "prefill-1")  # and the first encode worker, if there is one
NUM_LEAVING = 10_000
ALL_VICTIMS = (*VICTIMS, *RANK_VICTIMS, "encode-1")


def main() -> int:
    options = _options()
    if options.soak_minutes:
        return asyncio.run(_soak(options))
    if options.cuts:
        return _cuts(options)
    outcome = Outcome()
    if options.hosts:
        asyncio.run(run_hosts(_folder(options), outcome.hosts))
    elif options.sites:
        asyncio.run(run_sites(_folder(options), outcome.sites, options.site_fault or SITE_FAULTS))
    elif not options.frames:
        asyncio.run(_matrix(options, outcome))
    if options.frames or options.is_full_matrix:
        asyncio.run(_frames(options, outcome))
    for name, counts in outcome.leftovers.items():
        print(f"{name} still holds {counts}")
    if options.is_full_matrix or options.save:
        found = (*outcome.rows, *outcome.frames, *outcome.hosts, *outcome.sites)
        rows = [msgspec.to_builtins(row) for row in found]
        _save("chaos", options, rows, bars_of(outcome))
    return int(outcome.is_bad)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description="The matrix of faults.")
    parser.add_argument("--victim", action="append", choices=ALL_VICTIMS)
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--phase", action="append", choices=(*PHASES, "encoding"))
    parser.add_argument("--demo-model", action="store_true", help="instead of the timing engine")
    about = "clients over NATS: kill and freeze, without frames, clients that leave and restarts"
    parser.add_argument("--nats", action="store_true", help=about)
    about = "streams under grammars, and calls of tools: kill and freeze of decode workers"
    parser.add_argument("--constrained", action="store_true", help=about)
    about = "ranks of workers of the demo model: kill and freeze"
    parser.add_argument("--ranks", action="store_true", help=about)
    about = "streams with pictures: kill and freeze of encode, prefill and decode workers"
    parser.add_argument("--images", action="store_true", help=about)
    about = "only a host of several models, all rows: its process is killed or frozen"
    parser.add_argument("--hosts", action="store_true", help=about)
    about = "only two linked sites, all rows: the link, or one of the sites, fails"
    parser.add_argument("--sites", action="store_true", help=about)
    about = "with --sites: only these faults"
    parser.add_argument("--site-fault", action="append", choices=SITE_FAULTS, help=about)
    about = "only two linked sites: N cuts of their link of 30 s, under 64 streams"
    parser.add_argument("--cuts", type=int, metavar="N", help=about)
    about = "only KV frames that are spoilt on their way"
    parser.add_argument("--frames", action="store_true", help=about)
    about = "no faults: a steady load, and whether anybody suspects anybody"
    parser.add_argument("--soak-minutes", type=float, metavar="N", help=about)
    parser.add_argument("--save", action="store_true", help="the result of a part or a soak, too")
    parser.add_argument("--keep-logs", action="store_true")
    options = parser.parse_args()
    if options.site_fault and not options.sites:
        parser.error("--site-fault is one of --sites")
    is_part = options.victim or options.fault or options.phase or options.frames
    is_short = options.nats or options.constrained or options.ranks or options.hosts
    is_short = is_short or options.sites or options.images
    options.is_full_matrix = not (is_part or is_short)
    if options.ranks:
        options.demo_model = True
        options.victim = options.victim or list(RANK_VICTIMS)
    if options.images:
        options.victim = options.victim or list(IMAGE_VICTIMS)
        options.phase = options.phase or list(IMAGE_PHASES)
    if options.constrained and options.victim is None:
        options.victim = ["decode-1"]
    victims, faults = options.victim or VICTIMS, options.fault or FAULTS
    if not any(can_befall(*each) for each in itertools.product(faults, victims)):
        parser.error(f"{' or '.join(faults)} cannot befall {' or '.join(victims)}")
    return options


async def _matrix(options: argparse.Namespace, outcome: Outcome) -> None:
    phases: list[Phase] = options.phase or list(PHASES)
    is_short = options.nats or options.constrained or options.ranks or options.images
    for is_queued in (False, True):
        wanted = [phase for phase in phases if (phase == "queued") == is_queued]
        if not wanted:
            continue
        async with chaos(options, FEW_RESERVATIONS if is_queued else WORKERS) as running:
            for victim in options.victim or VICTIMS:
                wanted_faults = options.fault or (FAULTS[:2] if is_short else FAULTS)
                faults = [each for each in wanted_faults if can_befall(each, victim)]
                for fault in faults:
                    for phase in wanted:
                        row = await run_row(running, fault, victim, phase)
                        print(row, flush=True)
                        outcome.rows.append(row)
            if options.is_full_matrix and not is_queued:
                await leave_early(running, NUM_LEAVING)
                outcome.num_left = NUM_LEAVING
                await running.wait_until_empty()
            outcome.leftovers |= await running.leftovers()
            if options.is_full_matrix and not is_queued:
                await _restart_all(running, outcome)


def _cuts(options: argparse.Namespace) -> int:
    flow = asyncio.run(run_cuts(_folder(options), options.cuts))
    bars = cut_bars(flow)
    for bar in bars:
        print(bar)
    if options.save:
        _save("chaos_links", options, [msgspec.to_builtins(each) for each in flow.cuts], bars)
        (RESULTS / "chaos_links.svg").write_text(svg_of(flow))
    return int(not all(each.holds for each in bars))


async def _restart_all(running: Chaos, outcome: Outcome) -> None:
    restarts, load = await restart_each(running, [*running.cluster.services])
    for each in restarts:
        print(each, flush=True)
    outcome.num_restarted = len(restarts)
    outcome.num_unclean = sum(each.exit_status != 0 for each in restarts)
    outcome.longest_drain_s = max(each.drain_s for each in restarts)
    outcome.failed_in_restart = len(load.failed)
    print(f"{load.num_requests} requests meanwhile, {load.num_refused} tries refused", flush=True)


async def _soak(options: argparse.Namespace) -> int:
    async with chaos(options, WORKERS) as running:
        started, give_up_at = time.time(), time.monotonic() + 60 * options.soak_minutes
        async with Steady(running) as load:
            while time.monotonic() < give_up_at:
                await asyncio.sleep(1.0)
                running.monitor.forget()
        suspected = suspicions(running.cluster, None, started)
        row = {
            "minutes": options.soak_minutes,
            "clients": load.num_clients,
            "requests": load.num_requests,
            "tokens": load.num_tokens,
            "failed": len(load.failed),
            "refused": load.num_refused,
            "resubmitted": load.num_resubmitted,
            "suspicions": len(suspected),
            "load average": os.getloadavg()[2],  # includes other load on this machine
        }
        print(*suspected, sep="\n")
    bars = [
        at_most("suspicions of anybody", len(suspected), 0, "suspicions"),
        at_most("failed", len(load.failed), 0, "requests"),
    ]
    if options.save:
        _save("chaos_soak", options, [row], bars)
    return int(bool(load.failed or suspected))


async def _frames(options: argparse.Namespace, outcome: Outcome) -> None:
    """Each way to spoil a frame separately, on each transport."""
    for transport in TRANSPORTS:
        folder = _folder(options)
        async with running_frames(folder, transport, is_model=options.demo_model) as (
            it,
            frame_relays,
        ):
            for spoiling in SPOILINGS:
                row = await run_frames(it, frame_relays, transport, spoiling)
                print(row, flush=True)
                outcome.frames.append(row)


@contextlib.asynccontextmanager
async def chaos(options: argparse.Namespace, workers: dict[str, str]) -> AsyncIterator[Chaos]:
    async with running_chaos(
        _folder(options),
        workers,
        is_model=options.demo_model,
        is_nats=options.nats,
        is_constrained=options.constrained,
        has_ranks=options.ranks,
        has_images=options.images,
    ) as running:
        for worker in (*LEARNED_WITHOUT, *running.cluster.named("encode")[:1]):
            await running.learn_without(worker)
        yield running


def _save(
    name: str, options: argparse.Namespace, rows: list[dict[str, object]], bars: list[Bar]
) -> None:
    model = "_demo_model" if options.demo_model and not options.ranks else ""
    model += "_ranks" if options.ranks else ""
    model += "_hosts" if options.hosts else ""
    model += "_sites" if options.sites else ""
    model += "_images" if options.images else ""
    model += "_nats" if options.nats else ""
    model += "_constrained" if options.constrained else ""
    write_result(name + model, rows, bars, ["-m", "tests.chaos", *sys.argv[1:]])


def _folder(options: argparse.Namespace) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="hearth-chaos-"))
    if options.keep_logs:
        print(f"logs: {folder}", flush=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
