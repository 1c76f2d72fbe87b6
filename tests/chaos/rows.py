"""One row of the matrix: a fault that meets one process while 32 streams are in one phase.

What a row has to show: every request ends whole, each answer is the one of the undisturbed run, to
the last logprob, and afterwards no worker holds anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from shared.messages import AbortRequest, CancelQueued, KvEvents, Placed
from tests.chaos.clients import ChoiceTold, Exchange, converse
from tests.chaos.cluster import SERVERS, ChaosCluster
from tests.chaos.leftovers import left_behind
from tests.chaos.logs import given_up, suspicions
from tests.chaos.monitor import Monitor, is_empty
from tests.chaos.workload import Body, requests, with_stops

Fault = Literal["kill", "freeze"]
Phase = Literal["queued", "placed", "prefilling", "transferring", "decoding", "finishing"]

PHASES: tuple[Phase, ...] = (
    "queued",
    "placed",
    "prefilling",
    "transferring",
    "decoding",
    "finishing",
)
VICTIMS = (
    "decode-1",
    "prefill-1",
    "scheduler-1",
    "kv_index-1",
    "gateway-1",
    "nats-server",
    "redis-server",
)

FROZEN_S = 4.0
FROZEN_GATEWAY_S = 6.0  # longer than its workers' lease: they have dropped what it owned
SERVER_OUTAGE_S = 0.5  # a supervisor starts a server again after that
NUM_LATE = 4  # requests that come while the fault lasts
LATE_AFTER_S = 0.2
ROW_TIMEOUT_S = 60.0
MAX_TRIES = 8
POLL_S = 0.005


@dataclass(frozen=True)
class Moment:
    monotonic: float
    wall: float

    @classmethod
    def now(cls) -> Moment:
        return cls(time.monotonic(), time.time())


class Row(msgspec.Struct, kw_only=True):
    """Seconds. `excess_s`: the longest pause less what computing it again takes undisturbed: the
    same stream's time to its first token, among all others, where only the spares are there. Who
    waits in a queue does so by chance: there, the longest such time of all.
    """

    fault: str
    process: str
    phase: str
    streams: int
    lost: int
    altered: int
    resubmitted: int
    broken: int  # connections of a dead gateway: their clients ask again, elsewhere
    refused: int  # 429 or 503 with Retry-After: their clients ask again
    suspected: int  # times that a process was suspected to which nothing had been done
    detect_s: float | None
    longest_pause_s: float
    excess_s: float
    outage_s: float | None  # of a server or a frozen gateway, which nothing can shorten
    whole_after_s: float | None  # until every pool was whole, from the last answer; None: never

    @property
    def is_bad(self) -> bool:
        return bool(self.lost or self.altered or self.whole_after_s is None)

    def __str__(self) -> str:
        words = [f"{self.fault:6} {self.process:12} {self.phase:12}"]
        for name, value in msgspec.to_builtins(self).items():
            if isinstance(value, int | float):
                words.append(f"{name} {value:g}")
        return "  ".join(words)


@dataclass
class Asked:
    """One client's request with all its tries; the last one counts."""

    path: str
    body: Body
    tries: list[Exchange] = field(default_factory=list)

    @property
    def last(self) -> Exchange:
        return self.tries[-1]


@dataclass
class Undisturbed:
    told: list[dict[int, ChoiceTold]]
    usage: list[tuple[int, int]]
    longest_gap_s: float
    ttft_s: list[float]
    ttft_without_s: dict[str, list[float]]  # where one worker is not there


class Chaos:
    """A cluster, what it is asked, and what it answers when nothing is wrong."""

    def __init__(self, cluster: ChaosCluster, monitor: Monitor) -> None:
        self.cluster = cluster
        self.monitor = monitor
        self.requests = requests()
        self.undisturbed: Undisturbed
        self.idle: dict[str, dict[str, int]]  # what each process holds after undisturbed runs
        self._num_runs = 0

    async def learn(self) -> None:
        """Runs undisturbed: once to see what stop strings would cut, once for the truth."""
        first = await self.run()
        with_stops(self.requests, [each.last.told for each in first])
        asked = await self.run()
        exchanges = [each.last for each in asked]
        assert all(each.is_whole for each in exchanges), [*map(str, exchanges)]
        self.undisturbed = Undisturbed(
            told=[each.told for each in exchanges],
            usage=[each.usage for each in exchanges],
            longest_gap_s=max(each.pause_since(each.arrivals[0]) for each in exchanges),
            ttft_s=[each.ttft_s for each in exchanges],
            ttft_without_s={},
        )
        await self.wait_until_whole()
        self.idle = {name: await self.cluster.census(name) for name in self.cluster.services}

    async def leftovers(self) -> dict[str, dict[str, int]]:
        """What each process holds beyond what it needs when nothing runs; empty if all is well."""
        found = {}
        for name in self.cluster.services:
            held = left_behind(self.idle[name], await self.cluster.census(name))
            if held:
                found[name] = held
        return found

    async def learn_without(self, worker: str) -> None:
        """What the spares alone take, undisturbed."""
        self.cluster.terminate(worker)
        await self.cluster.ended(worker, 20)
        asked = await self.run()
        self.undisturbed.ttft_without_s[worker] = [each.last.ttft_s for each in asked]
        await self.cluster.restart(worker)
        await self.cluster.wait_until_ready()

    async def run(self) -> list[Asked]:
        asked, tasks = self.ask_all()
        await asyncio.gather(*tasks)
        return asked

    def ask_all(self) -> tuple[list[Asked], list[asyncio.Task[None]]]:
        """Through both gateways by turns; each run has a salt, so that no cache knows it."""
        self._num_runs += 1
        salt = f"run {self._num_runs}"
        asked = [Asked(path, {**body, "cache_salt": salt}) for path, body in self.requests]
        gateways = [*self.cluster.urls]
        tasks = [
            asyncio.create_task(self.ask(each, gateways[index % len(gateways) :] + gateways))
            for index, each in enumerate(asked)
        ]
        return asked, tasks

    async def ask(self, asked: Asked, gateways: list[str]) -> None:
        """As a client does: asks again, at the next door, where that is invited."""
        for number in range(MAX_TRIES):
            gateway = gateways[number % len(gateways)]
            exchange = Exchange(asked.body, gateway)
            asked.tries.append(exchange)
            url = self.cluster.urls[gateway]
            await converse(exchange, url, self.cluster.api_key, asked.path)
            if exchange.status in (429, 503) and exchange.has_retry_after:
                await asyncio.sleep(0.5)
            elif exchange.is_broken:
                await asyncio.sleep(0.1)
            else:
                return

    def is_same(self, index: int, exchange: Exchange) -> bool:
        """Whether it told what the undisturbed run of request `index` told."""
        true = self.undisturbed
        return exchange.told == true.told[index] and exchange.usage == true.usage[index]

    async def wait_until_whole(self, timeout_s: float = 20.0) -> float:
        """Seconds until every worker is without work and its pool whole. Raises TimeoutError."""
        started = time.monotonic()
        self.monitor.newest.clear()
        names = {*self.cluster.named("prefill"), *self.cluster.named("decode")}

        def holds() -> bool:
            newest = self.monitor.newest
            return names <= newest.keys() and all(is_empty(newest[name]) for name in names)

        await self.monitor.wait(holds, timeout_s=timeout_s)
        return time.monotonic() - started


async def run_row(chaos: Chaos, fault: Fault, victim: str, phase: Phase) -> Row:
    cluster, monitor = chaos.cluster, chaos.monitor
    monitor.forget()
    asked, tasks = chaos.ask_all()
    await _until(_in_phase(phase, monitor, asked, victim))
    struck = Moment.now()
    cluster.kill(victim) if fault == "kill" else cluster.freeze(victim)
    repair = asyncio.create_task(_repair(cluster, fault, victim))
    late, late_tasks = await _ask_late(chaos, victim)
    _, unfinished = await asyncio.wait([*tasks, *late_tasks], timeout=ROW_TIMEOUT_S)
    for task in unfinished:
        task.cancel()
    outage_s = await repair
    if fault == "kill" and victim not in SERVERS:
        await cluster.restart(victim)
    await cluster.wait_until_ready()
    try:
        whole_after_s: float | None = await chaos.wait_until_whole()
    except TimeoutError:
        whole_after_s = None
    return _judge(chaos, fault, victim, phase, asked, late, struck, outage_s, whole_after_s)


async def _ask_late(chaos: Chaos, victim: str) -> tuple[list[Asked], list[asyncio.Task[None]]]:
    await asyncio.sleep(LATE_AFTER_S)
    gateways = [each for each in chaos.cluster.urls if each != victim]
    salt = {"cache_salt": f"late {time.monotonic()}"}
    late = [Asked(path, body | salt) for path, body in chaos.requests[:NUM_LATE]]
    return late, [asyncio.create_task(chaos.ask(each, gateways)) for each in late]


async def _repair(cluster: ChaosCluster, fault: Fault, victim: str) -> float | None:
    """Seconds that nobody could have been served by the victim, where it has no spare."""
    started = time.monotonic()
    if fault == "freeze":
        await asyncio.sleep(FROZEN_GATEWAY_S if victim.startswith("gateway") else FROZEN_S)
        cluster.thaw(victim)
    elif victim in SERVERS:
        await asyncio.sleep(SERVER_OUTAGE_S)
        await cluster.restart(victim)
    is_lasting = victim == "nats-server" or (fault == "freeze" and victim.startswith("gateway"))
    return time.monotonic() - started if is_lasting else None


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(POLL_S)


def _in_phase(
    phase: Phase, monitor: Monitor, asked: list[Asked], victim: str
) -> Callable[[], bool]:
    """Tells from outside when most streams are in `phase`, or the victim's part of them."""

    def placed() -> list[float]:
        return [each.at for each in monitor.of(Placed)]

    def stored() -> bool:
        names = {each.subject for each in monitor.of(KvEvents)}
        return victim in names if victim.startswith("prefill") else bool(names)

    def is_queued() -> bool:
        times = placed()
        is_waiting = 4 <= len(times) <= len(asked) - 4
        return is_waiting and time.monotonic() - times[-1] > 0.04

    def is_placed() -> bool:
        ids = {each.message.worker_id for each in monitor.of(Placed)}
        return victim in ids if victim.startswith("decode") else bool(ids)

    def is_decoding() -> bool:
        return sum(bool(a.tries) and len(a.last.arrivals) >= 15 for a in asked) >= 24

    return {
        "queued": is_queued,
        "placed": is_placed,
        "prefilling": lambda: len(placed()) >= 4 and time.monotonic() - placed()[3] > 0.03,
        "transferring": stored,
        "decoding": is_decoding,
        "finishing": lambda: sum(bool(a.tries) and a.last.is_done for a in asked) >= 3,
    }[phase]


def _judge(
    chaos: Chaos,
    fault: Fault,
    victim: str,
    phase: Phase,
    asked: list[Asked],
    late: list[Asked],
    struck: Moment,
    outage_s: float | None,
    whole_after_s: float | None,
) -> Row:
    everyone = [*enumerate(asked), *enumerate(late)]
    is_dead_gateway = fault == "kill" and victim.startswith("gateway")
    tries = [each for _, a in everyone for each in a.tries]
    strangers = [e for e in tries if e.is_broken and not (is_dead_gateway and e.gateway == victim)]
    pauses = _pauses(chaos, asked, struck.monotonic, victim, phase)
    return Row(
        fault=fault,
        process=victim,
        phase=phase,
        streams=len(everyone),
        lost=len(
            {id(e) for e in strangers} | {id(a.last) for _, a in everyone if not a.last.is_whole}
        ),
        altered=sum(a.last.is_whole and not chaos.is_same(i, a.last) for i, a in everyone),
        resubmitted=sum(a.last.served.get("num_resubmissions", 0) > 0 for _, a in everyone),
        broken=sum(e.is_broken for e in tries) - len(strangers),
        refused=sum(e.status in (429, 503) and e.has_retry_after for e in tries),
        suspected=len(suspicions(chaos.cluster, victim, struck.wall)),
        detect_s=_detected(chaos, victim, struck),
        longest_pause_s=round(max((p for p, _ in pauses), default=0.0), 3),
        excess_s=round(max((e for _, e in pauses), default=0.0), 3),
        outage_s=None if outage_s is None else round(outage_s, 3),
        whole_after_s=None if whole_after_s is None else round(whole_after_s, 3),
    )


def _pauses(
    chaos: Chaos, asked: list[Asked], struck_at: float, victim: str, phase: Phase
) -> list[tuple[float, float]]:
    """(pause, pause less the time to compute it again) of each stream that was not broken."""
    true, found = chaos.undisturbed, []
    recompute_s = true.ttft_without_s.get(victim, true.ttft_s)
    if phase == "queued":
        recompute_s = [max(recompute_s)] * len(recompute_s)
    for each, again_s in zip(asked, recompute_s, strict=True):
        if len(each.tries) == 1 and each.last.is_whole:
            pause_s = each.last.pause_since(struck_at)
            found.append((pause_s, pause_s - again_s))
    return found


def _detected(chaos: Chaos, victim: str, struck: Moment) -> float | None:
    """Until the last of the victim's requests was taken from it, which is told in that moment."""
    monitor = chaos.monitor
    if victim.startswith("prefill"):
        after = [at - struck.wall for at in given_up(chaos.cluster, victim, struck.wall)]
    else:
        placed = {each.message.placement_id for each in monitor.of(Placed)}
        times = [each.at for each in monitor.of(CancelQueued, victim)]
        for each in monitor.of(AbortRequest, victim):
            if each.message.reason == "superseded" and each.message.placement_id in placed:
                times.append(each.at)
        after = [at - struck.monotonic for at in times]
    return round(max(after), 3) if any(each > 0 for each in after) else None
