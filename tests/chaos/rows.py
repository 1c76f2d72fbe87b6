"""One row of the matrix: a fault that hits one process while 32 streams are in one phase.

A row must show: every request completes, each response equals that of the undisturbed run, to the
last logprob, and afterwards no worker holds anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from services.worker.worker import DEVICE_LOST_STATUS
from shared.messages import AbortRequest, CancelQueued, DrainState, DrainWorker, Placed
from shared.subjects import lifecycle
from shared.transport.bus import NatsBus
from tests.chaos.chaos import Call, Chaos
from tests.chaos.checks.logs import given_up, suspicions
from tests.chaos.checks.metrics import MetricWatch, runbook_metrics
from tests.chaos.checks.phases import Phase, reach
from tests.support.cluster.chaos_cluster import MONITOR, SERVERS, ChaosCluster
from tests.support.cluster.clients import Exchange
from tests.support.waiting import LIMIT_S, NotReached, until

# device: each step of a worker raises; drain: it hands over at once, and is then stopped
Fault = Literal["kill", "freeze", "device", "drain"]

VICTIMS = (
    "decode-1",
    "prefill-1",
    "scheduler-1",
    "kv_index-1",
    "gateway-1",
    "nats-server",
    "redis-server",
)

# Of workers whose ranks are processes; their spares have one process each.
RANK_VICTIMS = ("decode-1:0", "decode-1:1", "prefill-1:0", "prefill-1:1")
# decode workers: tests/end_to_end/models/test_image_recovery.py
IMAGE_VICTIMS = ("encode-1", "prefill-1", "decode-1")

FROZEN_S = 2.0  # it ends while most streams still run elsewhere
MAX_FROZEN_S = 20.0  # more, where a machine of few cores lets others notice it late
FROZEN_SERVER_S = 4.0  # long enough that connections are dropped
FROZEN_GATEWAY_S = 6.0  # longer than its workers' lease: they have dropped its requests
SERVER_OUTAGE_S = 0.5  # after which a supervisor restarts a server
NUM_LATE = 4  # requests that are sent during the fault
LATE_AFTER_S = 0.2
EXIT_TIMEOUT_S = LIMIT_S


class Row(msgspec.Struct, kw_only=True):
    """Seconds. `excess_s`: the longest pause minus the undisturbed time to recompute it: the same
    stream's time to first token, among all others, with the spares only. The wait in a queue, as
    that of an encoder, is random: there the longest such time of all streams is subtracted.
    """

    fault: str
    process: str
    phase: str
    streams: int
    lost: int
    altered: int
    resubmitted: int
    broken: int  # connections of a dead gateway: their clients retry elsewhere
    refused: int  # 429 or 503 with Retry-After: their clients retry
    suspected: int  # how often a process without a fault was suspected
    detect_s: float | None
    longest_pause_s: float
    excess_s: float
    outage_s: float | None  # of a server or a frozen gateway, which cannot be shortened
    whole_after_s: float | None  # from the last response until every pool was complete; None: never
    moved: int = 0  # metrics, of those that the runbook names
    unmoved: list[str] = []  # the others

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
class Strike:
    """A fault, its victim and time, and the requests that were open or sent during it."""

    fault: Fault
    victim: str
    rank: int | None  # of the victim: only this process of it is hit
    phase: Phase
    sent: list[Call]
    is_nats: bool
    late: list[Call] = field(default_factory=list)
    at: float = field(default_factory=time.monotonic)
    wall: float = field(default_factory=time.time)  # the same moment in the logs' clock
    thawed_at: float = math.inf  # a frozen victim fences its placements then

    @property
    def all_requests(self) -> list[tuple[int, Call]]:
        return [*enumerate(self.sent), *enumerate(self.late)]

    @property
    def tries(self) -> list[Exchange]:
        return [each for _, sent in self.all_requests for each in sent.tries]

    @property
    def broken(self) -> list[Exchange]:
        """Exchanges cut off by the death of their gateway, as expected. Over NATS a client does not
        know its gateway, and a frozen gateway or server loses its connections, too.
        """
        is_gateway = self.victim.startswith("gateway")
        broken = [each for each in self.tries if each.is_broken]
        if self.is_nats:
            return broken if is_gateway or self.victim == "nats-server" else []
        is_dead = is_gateway and self.fault == "kill"
        return [each for each in broken if is_dead and each.gateway == self.victim]

    @property
    def lost(self) -> int:
        """Exchanges cut off without that reason, or without a complete response in the end."""
        cut = {id(each) for each in self.tries if each.is_broken} - {id(e) for e in self.broken}
        return len(cut | {id(a.last) for _, a in self.all_requests if not a.last.is_successful})


async def run_row(chaos: Chaos, fault: Fault, process: str, phase: Phase) -> Row:
    """`process`: a service, or `service:rank`."""
    victim, _, number = process.partition(":")
    rank = int(number) if number else None
    cluster = chaos.cluster
    watch = MetricWatch(cluster.urls.values(), runbook_metrics(fault, victim))
    await watch.start()
    chaos.monitor.forget()
    sent, tasks = chaos.send_all()
    await reach(phase, chaos.monitor, sent, victim, chaos.undisturbed.limit_s)
    strike = Strike(fault, victim, rank, phase, sent, chaos.nats is not None)
    if rank is None:
        await _strike(cluster, fault, victim)
        repair = asyncio.create_task(_repair(chaos, strike, watch))
    else:  # its group ends by itself
        number_of = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
        os.kill(cluster.rank_pid(victim, rank), number_of[fault])
        repair = asyncio.create_task(_nothing())
    strike.late, late_tasks = await _send_late(chaos, victim)
    streams = [*tasks, *late_tasks]
    _, unfinished = await asyncio.wait(streams, timeout=chaos.undisturbed.limit_s)
    for task in unfinished:
        task.cancel()
    outage_s = await repair
    if fault == "device" or rank is not None:
        assert await cluster.ended(victim, EXIT_TIMEOUT_S) == DEVICE_LOST_STATUS
    if fault == "drain":
        cluster.terminate(victim)
        assert await cluster.ended(victim, EXIT_TIMEOUT_S) == 0
    if (fault != "freeze" or rank is not None) and victim not in SERVERS:
        await cluster.restart(victim)
    await cluster.wait_until_ready()
    try:
        whole_after_s: float | None = await chaos.wait_until_empty()
    except NotReached:
        whole_after_s = None
    unmoved = await watch.unmoved()
    row = _row(chaos, strike, outage_s, whole_after_s)
    return msgspec.structs.replace(row, moved=len(watch.names) - len(unmoved), unmoved=unmoved)


async def _nothing() -> None:
    return None


def can_befall(fault: Fault, victim: str) -> bool:
    """Ranks belong to a model, whose device does not fail on request."""
    is_worker = victim.startswith(("prefill", "decode")) and ":" not in victim
    return is_worker or fault in ("kill", "freeze")


async def _strike(cluster: ChaosCluster, fault: Fault, victim: str) -> None:
    match fault:
        case "kill":
            cluster.kill(victim)
        case "freeze":
            cluster.freeze(victim)
        case "device":
            cluster.break_device(victim)
        case "drain":
            await _drain(cluster.nats_url, victim)


async def _drain(nats_url: str, victim: str) -> None:
    bus = await NatsBus.connect(nats_url, process_id=MONITOR)
    try:
        subject = lifecycle(victim.partition("-")[0], victim)  # type: ignore[arg-type]
        command = DrainWorker(hand_over_s=0.0)
        await bus.request(subject, command, DrainState, timeout_s=EXIT_TIMEOUT_S)
    finally:
        await bus.close()


async def _send_late(chaos: Chaos, victim: str) -> tuple[list[Call], list[asyncio.Task[None]]]:
    await asyncio.sleep(LATE_AFTER_S)
    gateways = [each for each in chaos.cluster.urls if each != victim]
    salt = {"cache_salt": f"late {time.monotonic()}"}
    late = [Call(path, body | salt) for path, body in chaos.requests[:NUM_LATE]]
    return late, [asyncio.create_task(chaos.send(each, gateways)) for each in late]


async def _repair(chaos: Chaos, strike: Strike, watch: MetricWatch) -> float | None:
    """Returns the outage in seconds of a victim without a spare."""
    cluster, fault, victim = chaos.cluster, strike.fault, strike.victim
    started = time.monotonic()
    if fault == "freeze":
        await asyncio.sleep(_frozen_s(victim))
        with contextlib.suppress(NotReached):
            await until(lambda: _is_noticed(chaos, strike, watch), timeout_s=MAX_FROZEN_S)
        strike.thawed_at = time.monotonic()
        cluster.thaw(victim)
    elif victim in SERVERS:
        await asyncio.sleep(SERVER_OUTAGE_S)
        await cluster.restart(victim)
    is_lasting = victim == "nats-server" or (fault == "freeze" and victim.startswith("gateway"))
    return time.monotonic() - started if is_lasting else None


def _is_noticed(chaos: Chaos, strike: Strike, watch: MetricWatch) -> bool:
    """Whether a gateway shows the loss of a service, and a decode worker's streams have moved."""
    if strike.victim in SERVERS:
        return True
    load = chaos.monitor.newest[strike.victim].load
    has_streams = strike.victim.startswith("decode") and load is not None and load.num_running
    return watch.has_moved and (not has_streams or _detected(chaos, strike) is not None)


def _frozen_s(victim: str) -> float:
    if victim in SERVERS:
        return FROZEN_SERVER_S
    return FROZEN_GATEWAY_S if victim.startswith("gateway") else FROZEN_S


def _row(chaos: Chaos, strike: Strike, outage_s: float | None, whole_after_s: float | None) -> Row:
    all_requests, pauses = strike.all_requests, _pauses(chaos, strike)
    return Row(
        fault=strike.fault,
        process=strike.victim if strike.rank is None else f"{strike.victim}:{strike.rank}",
        phase=strike.phase,
        streams=len(all_requests),
        lost=strike.lost,
        altered=sum(a.last.is_successful and not chaos.is_same(i, a.last) for i, a in all_requests),
        resubmitted=sum(a.last.metadata.get("num_resubmissions", 0) > 0 for _, a in all_requests),
        broken=len(strike.broken),
        refused=sum(e.status in (429, 503) and e.has_retry_after for e in strike.tries),
        suspected=len(suspicions(chaos.cluster, strike.victim, strike.wall)),
        detect_s=_rounded(_detected(chaos, strike)),
        longest_pause_s=round(max((p for p, _ in pauses), default=0.0), 3),
        excess_s=round(max((e for _, e in pauses), default=0.0), 3),
        outage_s=_rounded(outage_s),
        whole_after_s=_rounded(whole_after_s),
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _pauses(chaos: Chaos, strike: Strike) -> list[tuple[float, float]]:
    """(pause, pause minus the time to recompute it) of each stream that was not broken."""
    expected, found = chaos.undisturbed, []
    recompute_s = expected.ttft_without_s.get(strike.victim, expected.ttft_s)
    if strike.phase == "queued" or chaos.has_images:
        recompute_s = [max(recompute_s)] * len(recompute_s)
    for each, again_s in zip(strike.sent, recompute_s, strict=True):
        if len(each.tries) == 1 and each.last.is_successful:
            pause_s = each.last.pause_since(strike.at)
            found.append((pause_s, pause_s - again_s))
    return found


def _detected(chaos: Chaos, strike: Strike) -> float | None:
    """Seconds until the last of the victim's requests was moved, which is logged immediately."""
    monitor, victim = chaos.monitor, strike.victim
    if victim.startswith(("encode", "prefill")):
        after = [at - strike.wall for at in given_up(chaos.cluster, victim, strike.wall)]
        return max(after, default=None)
    placed = {each.message.placement_id for each in monitor.of(Placed)}
    times = [each.at for each in monitor.of(CancelQueued, victim)]
    for each in monitor.of(AbortRequest, victim):
        if each.message.reason == "superseded" and each.message.placement_id in placed:
            times.append(each.at)
    return max((at - strike.at for at in times if strike.at < at < strike.thawed_at), default=None)
