"""Runs a plan of linked sites until all are idle, and lists everything that was wrong."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from dataclasses import dataclass, field

from shared import background
from tests.simulation.checks.excuses import unexplained
from tests.simulation.checks.invariants import (
    SETTLE_S,
    num_losses,
    wrongs_of_accounts,
    wrongs_of_client,
)
from tests.simulation.plan import PATIENT_S
from tests.simulation.simulation import LIMIT_S, POLL_INTERVAL_S, Journal, ending_of, journal
from tests.simulation.sites.drawing import sites_plan_of
from tests.simulation.sites.plan import SitesPlan
from tests.simulation.sites.world import LinkedFleets
from tests.simulation.world.client import Client
from tests.simulation.world.fleet import Fleet
from tests.support.world.clock import VirtualLoop

# A home that works serves its requests in so many seconds, whatever happens to links.
SERVED_S = 40.0
LACKS = ("no_capacity", "deadline_exceeded", "overloaded")


@dataclass
class SitesOutcome:
    seed: int
    wrongs: list[str] = field(default_factory=list)
    endings: Counter[str] = field(default_factory=Counter)
    num_crossed: int = 0
    num_lied_to: int = 0
    virtual_s: float = 0.0

    @property
    def replay(self) -> str:
        return f".venv/bin/python -m tests.simulation.sites --first {self.seed} --seeds 1"


def simulate_sites(seed: int) -> SitesOutcome:
    return run_sites(sites_plan_of(seed))


def run_sites(plan: SitesPlan) -> SitesOutcome:
    background._failed.clear()  # heartbeats tell it; other tests of this process have counted, too
    loop = VirtualLoop()
    with journal() as logs:
        broken: list[str] = []
        loop.set_exception_handler(lambda _, context: broken.append(repr(context)))
        try:
            outcome = loop.run_until_complete(_run(plan, logs))
            gc.collect()  # reports unretrieved exceptions of collected tasks
        finally:
            asyncio.set_event_loop(None)
            loop.close()
    outcome.wrongs += [f"unhandled: {each}" for each in broken]
    outcome.wrongs += [f"logged: {each}" for each in logs.errors]
    return outcome


async def _run(plan: SitesPlan, logs: Journal) -> SitesOutcome:
    sites, outcome = LinkedFleets(plan), SitesOutcome(plan.seed)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(LIMIT_S):
            await sites.start()
            running = asyncio.gather(sites.serve(), sites.suffer())
            while not running.done() or sites.is_busy:
                sites.supervise()
                await asyncio.sleep(POLL_INTERVAL_S)
            running.result()
    except TimeoutError:
        outcome.wrongs.append(f"requests are open after {LIMIT_S:g} s")
    ended_at = loop.time()
    while sites.leaks() and loop.time() < ended_at + SETTLE_S:
        sites.supervise()
        await asyncio.sleep(POLL_INTERVAL_S)
    outcome.wrongs += [f"left over: {each}" for each in sites.leaks()]
    outcome.wrongs += sites.wrongs
    for name, fleet in sites.fleets.items():
        found = [*fleet.monitor.wrongs, *wrongs_of_accounts(fleet)]
        for client in fleet.clients:
            outcome.endings[ending_of(client)] += 1
            wrongs = [*wrongs_of_client(client), *_unexplained(client, fleet, plan)]
            found += [f"{client.plan.request_id}: {each}" for each in wrongs]
        outcome.wrongs += [f"{name}: {each}" for each in found]
    outcome.num_crossed = sites.num_crossed.total()
    outcome.num_lied_to = 0 if sites.liar is None else sites.liar.num_starts
    outcome.virtual_s = loop.time()
    await sites.stop()
    return outcome


def _unexplained(client: Client, fleet: Fleet, plan: SitesPlan) -> list[str]:
    """Returns what is wrong about the end of this request. A home that can serve it must do so,
    whatever happens to links and other sites.
    """
    error = client.rejection if client.end is None else client.end.error
    if num_losses(client) and not plan.has_faults:
        return ["was submitted again for no reason"]
    if _can_serve(client, fleet):
        reason = unexplained(client, fleet.plan, fleet.troubles_of(client))
        is_steady = not fleet.plan.faults and client.plan.deadline_s == PATIENT_S
        if is_steady and client.end is not None and client.ended_at - client.sent_at > SERVED_S:
            return [f"took {client.ended_at - client.sent_at:.1f} s"]
        return [] if reason is None else [reason]
    if error is None or client.left:
        return []
    others = [each for each in plan.sites if each != fleet.site]
    is_served = any(_is_served(client, plan, each) for each in others)
    if error.code in LACKS and (plan.has_faults or not is_served):
        return []
    if error.code == "deadline_exceeded" and client.plan.deadline_s < PATIENT_S:
        return []
    return [f"another site serves it: {error.code}: {error}"]


def _can_serve(client: Client, fleet: Fleet) -> bool:
    regions = client.plan.regions
    return bool(fleet.plan.fleet.worker_ids) and (not regions or fleet.region in regions)


def _is_served(client: Client, plan: SitesPlan, site: str) -> bool:
    regions = client.plan.regions
    has_workers = bool(plan.sites[site].fleet.worker_ids)
    return has_workers and (not regions or plan.regions[site] in regions)
