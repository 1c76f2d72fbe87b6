"""Runs a plan of six sites, and lists every leak that the search has found."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryDirectory

from shared import background
from tests.simulation.residency.logs import SearchedLog, searched_log
from tests.simulation.residency.plan import ResidencyPlan
from tests.simulation.residency.planted import FORMS, plant, plant_in_cache
from tests.simulation.residency.world import ResidencyFleets
from tests.simulation.simulation import POLL_INTERVAL_S, ending_of
from tests.support.world.clock import VirtualLoop

LIMIT_S = 3600.0
SETTLED_S = 5.0  # after the last request: what is withdrawn then is gone


@dataclass
class ResidencyOutcome:
    endings: Counter[str] = field(default_factory=Counter)
    leaks: Counter[str] = field(default_factory=Counter)
    examples: Counter[str] = field(default_factory=Counter)
    not_found: Counter[str] = field(default_factory=Counter)  # planted leaks, by form
    num_seen: Counter[str] = field(default_factory=Counter)  # sightings, where they may be, too
    events: Counter[str] = field(default_factory=Counter)  # of logs
    wrongs: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)  # of all processes, by check
    num_runs: int = 1
    num_changes: int = 0  # of tenants' regions
    num_faults: int = 0  # of links and of processes
    num_crossed: int = 0
    num_of_classes: int = 0  # fingerprints of prompts that sites reported in a region class
    num_messages: int = 0
    num_bytes: int = 0
    virtual_s: float = 0.0

    @property
    def num_requests(self) -> int:
        return self.endings.total()

    def add(self, other: ResidencyOutcome) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


def run_residency(plan: ResidencyPlan) -> ResidencyOutcome:
    background._failed.clear()  # heartbeats tell it; other tests of this process have counted, too
    loop, broken = VirtualLoop(), list[str]()
    loop.set_exception_handler(lambda _, context: broken.append(repr(context)))
    with TemporaryDirectory() as folder, searched_log(Path(folder, "log")) as logs:
        try:
            outcome = loop.run_until_complete(_run(plan, logs, Path(folder)))
        finally:
            asyncio.set_event_loop(None)
            loop.close()
    outcome.wrongs.update(f"unhandled: {each}" for each in broken)
    outcome.wrongs.update(f"logged: {each}" for each in logs.errors)
    return outcome


async def _run(plan: ResidencyPlan, logs: SearchedLog, folder: Path) -> ResidencyOutcome:
    fleets, loop = ResidencyFleets(plan), asyncio.get_running_loop()
    logs.on_line = fleets.traffic.log
    await fleets.start()
    checking = loop.create_task(fleets.keep_checking())
    running = asyncio.gather(fleets.serve(), fleets.suffer(), plant(fleets, folder))
    outcome = ResidencyOutcome()
    try:
        async with asyncio.timeout(LIMIT_S):
            await running
            while fleets.is_busy:
                await asyncio.sleep(POLL_INTERVAL_S)
    except TimeoutError:
        outcome.wrongs[f"requests are open after {LIMIT_S:g} s"] += 1
    await asyncio.sleep(SETTLED_S + fleets.borders.withdrawn_s)
    checking.cancel()
    with suppress(asyncio.CancelledError):
        await checking
    fleets.traffic.search()
    fleets.borders.is_over = True
    plant_in_cache(fleets)
    fleets.check()
    fleets.traffic.files(folder)
    fleets.traffic.search()
    _judge(fleets, logs, outcome)
    await fleets.stop()
    return outcome


def _judge(fleets: ResidencyFleets, logs: SearchedLog, outcome: ResidencyOutcome) -> None:
    borders, plan = fleets.borders, fleets.of_tenants
    for fleet in fleets.fleets.values():
        outcome.endings.update(map(ending_of, fleet.clients))
    outcome.leaks, outcome.num_seen = borders.leaks, borders.num_seen
    outcome.examples.update(f"{leak}: {each}" for leak, each in borders.examples.items())
    outcome.not_found.update(FORMS - set(+borders.planted))
    outcome.events = Counter(logs.events)
    outcome.wrongs.update(fleets.wrongs)
    for each in fleets.refusals:
        outcome.refusals.update(each.totals)
    outcome.num_changes = len(plan.changes)
    of_processes = sum(len(each.faults) for each in plan.sites.sites.values())
    outcome.num_faults = len(plan.sites.faults) + of_processes
    outcome.num_crossed = fleets.num_crossed.total()
    outcome.num_of_classes = fleets.traffic.num_of_classes
    outcome.num_messages, outcome.num_bytes = fleets.traffic.num_messages, fleets.traffic.num_bytes
    outcome.virtual_s = asyncio.get_running_loop().time()
