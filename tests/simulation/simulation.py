"""Runs a seed's plan until the fleet is idle, and lists everything that was wrong."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import structlog

from shared import background
from tests.simulation.checks.invariants import SETTLE_S, SOON_S, held_too_long, wrongs_of
from tests.simulation.drawing import plan_of
from tests.simulation.plan import POISON, Plan
from tests.simulation.world.fleet import Fleet
from tests.support.world.clock import VirtualLoop

LIMIT_S = 400.0
RAISED = ("step_failed", "device_check_failed", "device_lost")
POLL_INTERVAL_S = 0.05


@dataclass
class Outcome:
    seed: int
    wrongs: list[str]
    digest: str
    virtual_s: float = 0.0
    settled_s: float = 0.0
    endings: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    durations_s: list[float] = field(default_factory=list)  # of requests that ended
    reports: Counter[str] = field(default_factory=Counter)  # of gateways, by class
    num_pushed_tokens: int = 0

    @property
    def replay(self) -> str:
        return f"scripts/simulate --first {self.seed} --seeds 1"


@dataclass
class Journal:
    """The services' logs from `warning` up, by event; errors in full."""

    events: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    def take(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> Any:
        name = str(event["event"])
        self.events[name] += 1
        if method in ("error", "exception", "critical"):
            self.errors.append(f"{name}: {event}")
        raise structlog.DropEvent


@contextmanager
def journal() -> Iterator[Journal]:
    before, logs = structlog.get_config(), Journal()
    structlog.configure(
        processors=[structlog.processors.format_exc_info, logs.take],
        wrapper_class=structlog.make_filtering_bound_logger(30),
        cache_logger_on_first_use=False,
    )
    try:
        yield logs
    finally:
        structlog.configure(**before)


def simulate(seed: int) -> Outcome:
    return run_plan(plan_of(seed))


def run_plan(plan: Plan) -> Outcome:
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
    outcome.wrongs += [f"logged: {each}" for each in logs.errors if not _is_caused_by(plan, each)]
    outcome.events = logs.events
    return outcome


def _is_caused_by(plan: Plan, error: str) -> bool:
    """Whether a logged error is one that the plan causes."""
    if plan.has("twin") and error.startswith("name_in_use"):
        return True
    raises = plan.has("runner_raises", "rank_killed", "rank_frozen", "gpu_faulty") or any(
        POISON in each.prompt for each in plan.requests
    )
    return raises and error.startswith(RAISED)


async def _run(plan: Plan, logs: Journal) -> Outcome:
    loop, fleet = asyncio.get_running_loop(), Fleet(plan)
    digest = blake2b(digest_size=8)

    def record(sender: str, subject: str, data: bytes) -> None:
        digest.update(f"{loop.time()!r} {sender} {subject} ".encode() + data)

    fleet.network.taps.append(record)
    outcome = Outcome(plan.seed, [], "")
    await _run_until_ended(fleet, outcome)
    await _settle(fleet, outcome)
    outcome.wrongs += wrongs_of(fleet, logs.events)
    outcome.reports = Counter(type(each).__name__ for each in fleet.reports)
    for client in fleet.clients:
        outcome.num_pushed_tokens += client.num_pushed_tokens
        outcome.endings[ending_of(client)] += 1
        if client.end is not None:
            outcome.durations_s.append(client.ended_at - client.sent_at)
        digest.update(repr((client.ended_at, client.choices)).encode())
    outcome.digest, outcome.virtual_s = digest.hexdigest(), loop.time()
    await fleet.stop()
    return outcome


async def _run_until_ended(fleet: Fleet, outcome: Outcome) -> None:
    """Runs until every request has ended and every fault has passed."""
    try:
        async with asyncio.timeout(LIMIT_S):
            await fleet.start()
            busy = asyncio.gather(fleet.serve(), fleet.suffer())
            while not busy.done() or _is_busy(fleet):
                fleet.monitor.check_bounds(fleet.hosts())
                fleet.supervise()
                await asyncio.sleep(POLL_INTERVAL_S)
            busy.result()
    except TimeoutError:
        outcome.wrongs.append(f"requests are open after {LIMIT_S:g} s")


def _is_busy(fleet: Fleet) -> bool:
    return fleet.is_replacing or any(client.is_open for client in fleet.clients)


async def _settle(fleet: Fleet, outcome: Outcome) -> None:
    loop = asyncio.get_running_loop()
    ended_at, is_late = loop.time(), False
    while fleet.leaks() and loop.time() < ended_at + SETTLE_S:
        fleet.supervise()
        await asyncio.sleep(POLL_INTERVAL_S)
        if not is_late and loop.time() > ended_at + SOON_S:
            is_late = True
            outcome.wrongs += [f"held too long: {each}" for each in held_too_long(fleet)]
    outcome.settled_s = loop.time() - ended_at


def ending_of(client: Any) -> str:
    if client.lost_gateway:
        return "gateway died"
    if client.rejection is not None:
        return f"refused: {client.rejection.code}"
    if client.end is None:
        return "never asked" if client.opened_at is None else "open"
    return "finished" if client.end.error is None else client.end.error.code
