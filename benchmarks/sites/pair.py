"""Two sites, 100 ms (round trip) and 1 Gb/s apart, in virtual time: what a link brings to one of
them, beside the site alone and beside the same workers on one bus.

Gateways, schedulers and workers are the services' own code; steps take the time of a formula, and
a token's KV is 128 KiB, so that 1 Gb/s carries that of 950 tokens a second. Each site has two
prefill and two decode workers. All requests arrive at `home`, whose capacity is measured first:
prompts of 500 to 1,500 tokens, answers of 32 to 96. A queue holds what its workers serve in two
seconds; what comes on top is rejected. A request is good if its first token comes within 3 s and
later ones every 60 ms or less on average.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import msgspec
import numpy as np

from benchmarks.report import Bar, Row, at_least, at_most
from benchmarks.roles.virtual_fleet import Arrival, Timeline, request_of_arrival
from services.gateway.streams.queued_openings import Opening
from shared.engine.executors.timing_executor import STATE_BYTES, StepCost
from shared.kv_wire.link import FrameHeader
from shared.kv_wire.tcp import DEAD_HOST_S
from shared.messages import Role, Served, StartDecode
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import run as run_virtually
from tests.support.world.gateway import StreamGateway
from tests.support.world.kv_link import DataPlane, FrameFate
from tests.support.world.links import LinkedNetworks
from tests.support.world.services import SimulatedScheduler
from tests.support.world.workers import SimulatedWorker

HOME, FAR = "home", "far"
ONE_WAY_S, BYTES_PER_S = 0.05, 1e9 / 8
KV_BYTES = 128 * 1024  # of a token
COST = StepCost(base_s=0.02, per_token_s=1e-4)
NUM_PREFILL = NUM_DECODE = 2
TTFT_S, ITL_S = 3.0, 0.06
FORM_S, END_S = 3.0, 60.0
QUEUE_S = 2.0
SEED = 7
_decode_start = msgspec.msgpack.Decoder(StartDecode).decode
BELOW, ABOVE = 0.7, 2.0  # of home's capacity


def run(scale: float) -> tuple[list[Row], list[Bar]]:
    lasts_s = 60.0 * scale
    capacity = _capacity(lasts_s / 2)
    rows: list[Row] = []
    found: dict[tuple[str, float], Row] = {}
    for load in (BELOW, ABOVE):
        arrivals = poisson(load * capacity, lasts_s)
        for name, shape in SHAPES.items():
            timelines = run_virtually(_serve(shape, arrivals, capacity), limit_s=1000.0)
            row = _row(name, load, timelines, lasts_s)
            found[name, load] = {**row, "home_capacity_per_s": capacity}
            rows.append(found[name, load])
    alone, linked, shared = ([found[name, load] for load in (BELOW, ABOVE)] for name in SHAPES)
    slower_ms = linked[0]["ttft_p50_ms"] - alone[0]["ttft_p50_ms"]
    return rows, [
        at_least("share prefilled at home, below its capacity", linked[0]["at_home"], 0.95, ""),
        at_most(
            "TTFT p50 over home alone, below its capacity",
            slower_ms,
            max(5.0, 0.05 * alone[0]["ttft_p50_ms"]),
            "ms",
        ),
        at_least(
            "goodput at twice home's capacity, to home alone", _ratio(linked, alone), 1.6, "x"
        ),
        at_least("goodput at twice home's capacity, to one bus", _ratio(linked, shared), 1.2, "x"),
    ]


def _ratio(ours: Sequence[Row], theirs: Sequence[Row]) -> float:
    return float(ours[1]["goodput_per_s"] / max(theirs[1]["goodput_per_s"], 1e-9))


@dataclass(frozen=True)
class Shape:
    has_far: bool
    is_one_bus: bool = False


SHAPES = {
    "home alone": Shape(has_far=False),
    "linked": Shape(has_far=True),
    "one bus": Shape(has_far=True, is_one_bus=True),
}


@dataclass(slots=True)
class SiteTimeline(Timeline):
    prefilled_by: str = ""
    is_at_far: bool = False  # its decode worker

    def on_served(self, choice_index: int, served: Served) -> None:
        self.prefilled_by = served.prefill_worker_id or ""

    @property
    def is_prefilled_at_home(self) -> bool:
        """Without a prefill worker, decode has computed the prompt."""
        return not self.is_at_far if not self.prefilled_by else HOME in self.prefilled_by


def poisson(per_s: float, lasts_s: float) -> list[Arrival]:
    draw, arrivals, at_s = Random(SEED), list[Arrival](), 0.0
    while (at_s := at_s + draw.expovariate(per_s)) < lasts_s:
        arrivals.append(Arrival(at_s, draw.randint(500, 1500), draw.randint(32, 96)))
    return arrivals


def _capacity(lasts_s: float) -> float:
    """Returns the requests a second that home alone ends while it always has some that wait."""
    arrivals = poisson(100.0, lasts_s)
    timelines = run_virtually(_serve(SHAPES["home alone"], arrivals, 10.0), limit_s=1000.0)
    ended = sorted(each.token_times[-1] for each in timelines if each.is_finished)
    return round(len(ended) / (ended[-1] - FORM_S), 2)


def _row(name: str, load: float, timelines: Sequence[SiteTimeline], lasts_s: float) -> Row:
    ended = [each for each in timelines if each.is_finished]
    ttft_ms = np.array([each.ttft_s for each in ended]) * 1e3
    good = sum(each.meets(TTFT_S, ITL_S) for each in ended)
    return {
        "sites": name,
        "load": f"{load:g} of home's",
        "requests_per_s": round(len(timelines) / lasts_s, 2),
        "ended": len(ended),
        "rejected": len(timelines) - len(ended),
        "goodput_per_s": round(good / lasts_s, 2),
        "ttft_p50_ms": round(float(np.percentile(ttft_ms, 50)), 1),
        "ttft_p99_ms": round(float(np.percentile(ttft_ms, 99)), 1),
        "at_home": round(sum(each.is_prefilled_at_home for each in ended) / len(ended), 3),
    }


# ── the sites ────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Site:
    """The processes of one site; `far` workers may join home's bus."""

    network: SimulatedNetwork
    name: str
    plane: DataPlane
    max_queued: int
    has_services: bool = True
    link: str = ""  # the name by which others know it
    gateway: StreamGateway = field(init=False)

    async def start(self) -> None:
        if self.has_services:
            self.gateway = StreamGateway(
                self.network, f"gateway-{self.name}", seed=1, site=self.link
            )
            scheduler = SimulatedScheduler(
                self.network,
                f"scheduler-{self.name}",
                seed=2,
                max_queued_requests=self.max_queued,
                site=self.link,
            )
            await self.gateway.process.start(self.gateway.start())
            await scheduler.process.start(scheduler.start())
        roles: list[tuple[Role, int]] = [("prefill", NUM_PREFILL), ("decode", NUM_DECODE)]
        for role, count in roles:
            for number in range(count):
                worker = SimulatedWorker(
                    self.network,
                    self.plane,
                    f"{role}-{self.name}-{number}",
                    (role,),
                    num_blocks=4096,
                    max_batch_tokens=2048,
                    max_sequences=64,
                    cost=COST,
                )
                await worker.start()


class _KvLink:
    """Frames between two places share one link."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def fate(self, sender: str, receiver: str, header: FrameHeader) -> FrameFate:
        if one_way_s(sender, receiver) == 0:
            return FrameFate()
        now = asyncio.get_running_loop().time()
        took_s = header.payload_bytes / STATE_BYTES * KV_BYTES / BYTES_PER_S
        self._free_at = max(now, self._free_at) + took_s
        # A link that is full is not a host that is dead
        stall_s = min(self._free_at - now, DEAD_HOST_S - 1.0)
        return FrameFate(stall_s=stall_s + ONE_WAY_S)


def one_way_s(sender: str, receiver: str) -> float:
    return ONE_WAY_S if (FAR in sender) != (FAR in receiver) else 0.0


async def _serve(shape: Shape, arrivals: Sequence[Arrival], capacity: float) -> list[SiteTimeline]:
    networks = {HOME: SimulatedNetwork(seed=SEED), FAR: SimulatedNetwork(seed=SEED)}
    max_queued = round(QUEUE_S * capacity)
    sites = []
    if shape.is_one_bus:
        plane = DataPlane(fate=_KvLink().fate, distance_s=one_way_s)
        networks[HOME].distance_s = one_way_s
        sites.append(_Site(networks[HOME], HOME, plane, 2 * max_queued))
        sites.append(_Site(networks[HOME], FAR, plane, 0, has_services=False))
    elif shape.has_far:
        LinkedNetworks(networks, {}, delay_s=ONE_WAY_S, bytes_per_s=BYTES_PER_S)
        sites += [
            _Site(network, name, DataPlane(), max_queued, link=name)
            for name, network in networks.items()
        ]
    else:
        sites.append(_Site(networks[HOME], HOME, DataPlane(), max_queued))
    for each in sites:
        await each.start()
    await asyncio.sleep(FORM_S)
    timelines = [SiteTimeline(each) for each in arrivals]
    networks[HOME].taps.append(_StartTap(timelines).take)
    gateway = sites[0].gateway
    await gateway.process.start(_send_all(gateway, timelines))
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            for timeline in timelines:
                await timeline.has_ended.wait()
    return timelines


class _StartTap:
    """Notes where each request was started last."""

    def __init__(self, timelines: Sequence[SiteTimeline]) -> None:
        self._timelines = timelines

    def take(self, sender: str, subject: str, data: bytes) -> None:
        if subject.endswith(".start"):
            request_id = _decode_start(data).request.request_id
            timeline = self._timelines[int(request_id.removeprefix("r"))]
            timeline.is_at_far = FAR in subject


async def _send_all(gateway: StreamGateway, timelines: Sequence[SiteTimeline]) -> None:
    loop = asyncio.get_running_loop()
    began_at, own = loop.time(), gateway.process.process_id
    for number, timeline in enumerate(timelines):
        await asyncio.sleep(max(0.0, began_at + timeline.arrival.at_s - loop.time()))
        timeline.sent_at = loop.time()
        request = request_of_arrival(number, timeline.arrival, gateway_id=own)
        gateway.driver.open([Opening(request, timeline)])
