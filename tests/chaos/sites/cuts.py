"""A link that is cut for 30 s at random times, while site b serves 64 streams of site a.

Site a has no worker of their model, so each cut pauses them; both sites serve short requests of
their own meanwhile. Some cuts end the connection and refuse new ones, others leave it half open:
accepted, and nothing passes. Between the sites are 100 ms and 1 Gb/s.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from benchmarks.report import Bar, at_least, at_most
from tests.chaos.sites.pair import SitePair, running_pair
from tests.chaos.sites.rows import crossed_after
from tests.chaos.sites.streams import FarStreams, OwnRequests, Stream, first_served

Kind = Literal["cut", "half open"]

CUT_S = 30.0
BETWEEN_S = (5.0, 15.0)
NUM_STREAMS, NUM_OUTPUT_TOKENS, STEP_S = 64, 250, 0.2  # 50 s without a cut
MAX_JOINED_S = 5.0
JOIN_TIMEOUT_S = 60.0
SEED = 1


class Cut(msgspec.Struct, kw_only=True):
    """Seconds. `began_s` counts from the first request. `running` are the streams of site a that
    had a token before it and more to come. `longest_pause_s` is of all streams, and includes the
    cut. `joined_s`: from its end to the first token of a new request over the link; `states_s`:
    until each site had a state of the other one. None: never.
    """

    kind: Kind
    began_s: float
    cut_s: float
    running: int
    longest_pause_s: float
    joined_s: float | None
    states_s: float | None
    own_sent: int
    own_failed: int


@dataclass
class Flow:
    """What the clients received: for each of them its streams, one after the other."""

    started: float
    sent: list[list[Stream]] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    lost: int = 0
    altered: int = 0

    @property
    def streams(self) -> list[Stream]:
        return [each for of_client in self.sent for each in of_client]


async def run_cuts(folder: Path, num_cuts: int) -> Flow:
    async with running_pair(folder, "without the model", step_s=STEP_S) as pair:
        streams = FarStreams(pair, NUM_STREAMS, NUM_OUTPUT_TOKENS)
        await streams.learn()
        return await _cut_all(pair, streams, num_cuts)


async def _cut_all(pair: SitePair, streams: FarStreams, num_cuts: int) -> Flow:
    rng, is_over = random.Random(SEED), asyncio.Event()
    flow = Flow(time.monotonic(), [[] for _ in range(NUM_STREAMS)])
    clients = [
        asyncio.create_task(_client(streams, index, sent, is_over))
        for index, sent in enumerate(flow.sent)
    ]
    for number in range(num_cuts):
        await asyncio.sleep(rng.uniform(*BETWEEN_S))
        kind: Kind = "half open" if number % 3 == 2 else "cut"
        flow.cuts.append(await _cut(pair, flow, kind))
        print(flow.cuts[-1], flush=True)
    is_over.set()
    await asyncio.gather(*clients)
    complete = [each for each in flow.streams if each.last.is_successful]
    flow.lost = len(flow.streams) - len(complete)
    flow.altered = sum(not streams.is_same(each) for each in complete)
    return flow


async def _client(
    streams: FarStreams, index: int, sent: list[Stream], is_over: asyncio.Event
) -> None:
    """A client that is rejected sends its request again: it had no token yet."""
    while not is_over.is_set():
        sent.append(Stream(index))
        await streams.run(sent[-1])


async def _cut(pair: SitePair, flow: Flow, kind: Kind) -> Cut:
    async with AsyncExitStack() as stack:
        own = [await stack.enter_async_context(OwnRequests(each, 1.0)) for each in pair.sites]
        began = time.monotonic()
        running = [of[-1] for of in flow.sent if of[-1].has_begun and not of[-1].last.ended]
        pair.link.cut() if kind == "cut" else pair.link.hold()
        await asyncio.sleep(CUT_S)
        pair.link.open()
        ended = time.monotonic()
    served_at = await first_served(pair, JOIN_TIMEOUT_S)
    await asyncio.sleep(1.0)  # most streams go on
    return Cut(
        kind=kind,
        began_s=round(began - flow.started, 3),
        cut_s=round(ended - began, 3),
        running=len(running),
        longest_pause_s=round(max((e.longest_pause_s(began) for e in running), default=0.0), 3),
        joined_s=None if served_at is None else round(served_at - ended, 3),
        states_s=await crossed_after(pair, ended),
        own_sent=sum(len(each.sent) for each in own),
        own_failed=sum(each.num_failed for each in own),
    )


def cut_bars(flow: Flow) -> list[Bar]:
    cuts = flow.cuts
    joined = [each.joined_s for each in cuts if each.joined_s is not None]
    crossed = [each.states_s for each in cuts if each.states_s is not None]
    never = sum(None in (each.joined_s, each.states_s) for each in cuts)
    through = sum(each.is_moved for each in flow.streams)
    return [
        at_least("streams that lived through a cut", through, NUM_STREAMS, "streams"),
        at_most(f"of {len(flow.streams)} streams lost", flow.lost, 0, "streams"),
        at_most("altered", flow.altered, 0, "streams"),
        at_most(
            "own requests that failed in a cut", sum(c.own_failed for c in cuts), 0, "requests"
        ),
        at_most("cuts after which the sites stay apart", never, 0, "cuts"),
        at_most(
            "end of a cut to a request over the link", max(joined, default=0.0), MAX_JOINED_S, "s"
        ),
        at_most("end of a cut to states of both", max(crossed, default=0.0), MAX_JOINED_S, "s"),
    ]
