"""One row: a link or a site fails while site b serves streams of site a.

A row must show: every stream completes and equals that of the undisturbed run, both sites serve
their own requests while only the link is away, and afterwards they serve each other's again and no
worker holds anything.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import msgspec

from tests.chaos.sites.faults import FAULTS
from tests.chaos.sites.pair import Home, SitePair
from tests.chaos.sites.streams import FarStreams, OwnRequests, Stream, first_served, moved_for_room
from tests.support.waiting import NotReached, until

NUM_LATE, LATE_AFTER_S = 4, 0.3
ROW_TIMEOUT_S = 150.0
JOIN_TIMEOUT_S = 30.0
WHOLE_TIMEOUT_S = 45.0  # longer than a site retains an end that nobody acknowledges


class SiteRow(msgspec.Struct, kw_only=True):
    """Seconds. `longest_pause_s` is between two tokens of a stream, from the fault on; without the
    model at home it lasts at least as long as the link is away, and without room as long as others
    have it; `undisturbed_pause_s` is that of a run without a fault. `joined_s`: from the end to
    the first token of a new request that site b serves for a; not measured if home has the model.
    `states_s`: until each site had a state of the other one. None: never.
    """

    fault: str
    home: str
    streams: int
    lost: int
    altered: int
    moved: int
    moved_for_room: int
    broken: int
    refused: int
    own_sent: int
    own_failed: int
    spares_own: bool
    own_longest_s: float
    fault_s: float
    longest_pause_s: float
    undisturbed_pause_s: float
    joined_s: float | None
    states_s: float | None
    whole_after_s: float | None
    reason: str = ""  # why the first of the lost ones was lost

    @property
    def is_bad(self) -> bool:
        own_failed = self.own_failed if self.spares_own else 0
        is_whole = self.whole_after_s is not None and not self.stays_apart
        return bool(self.lost or self.altered or own_failed) or not is_whole

    @property
    def stays_apart(self) -> bool:
        is_unserved = self.joined_s is None and self.home == "without the model"
        return is_unserved or self.states_s is None

    def __str__(self) -> str:
        words = [f"{self.fault:20} {self.home:18}"]
        for name, value in msgspec.to_builtins(self).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                words.append(f"{name} {value:g}")
        return "  ".join([*words, self.reason])


async def run_site_row(streams: FarStreams, name: str, home: Home) -> SiteRow:
    pair, fault = streams.pair, FAULTS[name]
    num_before = await moved_for_room(pair)
    sent, tasks = streams.send_all()
    await streams.until_begun(sent)
    async with AsyncExitStack() as stack:
        own = [await stack.enter_async_context(OwnRequests(each)) for each in pair.sites]
        struck_at = time.monotonic()
        striking = asyncio.create_task(_strike(pair, name))
        await asyncio.sleep(LATE_AFTER_S)
        late = [Stream(index) for index in range(NUM_LATE)]
        tasks += [asyncio.create_task(streams.run(each)) for each in late]
        ended_at = await striking
    has_model = home == "without room"  # it has room for a short request
    served_at = None if has_model else await first_served(pair, JOIN_TIMEOUT_S)
    _, unfinished = await asyncio.wait(tasks, timeout=ROW_TIMEOUT_S)
    for task in unfinished:
        task.cancel()
    every = [*sent, *late]
    lost = [each for each in every if not each.last.is_successful or _is_cut(each, fault.breaks)]
    own_sent = [each for requests in own for each in requests.sent]
    return SiteRow(
        fault=name,
        home=home,
        streams=len(every),
        lost=len(lost),
        altered=sum(each.last.is_successful and not streams.is_same(each) for each in every),
        moved=sum(each.is_moved for each in every),
        moved_for_room=max(0, await moved_for_room(pair) - num_before),  # 0 if the gateway died
        broken=sum(each.is_broken for stream in every for each in stream.tries),
        refused=sum(each.status in (429, 503) for stream in every for each in stream.tries),
        own_sent=len(own_sent),
        own_failed=sum(requests.num_failed for requests in own),
        spares_own=fault.spares_own,
        own_longest_s=round(max(requests.longest_s for requests in own), 3),
        fault_s=round(ended_at - struck_at, 3),
        longest_pause_s=round(max(each.longest_pause_s(struck_at) for each in sent), 3),
        undisturbed_pause_s=round(streams.longest_pause_s, 3),
        joined_s=None if served_at is None else round(served_at - ended_at, 3),
        states_s=await crossed_after(pair, ended_at),
        whole_after_s=await _whole_after(pair),
        reason=f"{lost[0].index}: {lost[0].last}" if lost else "",
    )


async def _strike(pair: SitePair, name: str) -> float:
    await FAULTS[name].strike(pair)
    return time.monotonic()


def _is_cut(stream: Stream, breaks: bool) -> bool:
    return not breaks and any(each.is_broken and each.status == 200 for each in stream.tries)


async def crossed_after(pair: SitePair, moment: float) -> float | None:
    """Returns the seconds until both sites had a state of the other one; None: not in time."""

    def first_times() -> list[float]:
        found = (next((at for at, _ in s.states_at if at >= moment), 0.0) for s in pair.sites)
        return [at for at in found if at]

    try:
        await until(lambda: len(first_times()) == len(pair.sites), timeout_s=JOIN_TIMEOUT_S)
    except NotReached:
        return None
    return round(max(first_times()) - moment, 3)


async def _whole_after(pair: SitePair) -> float | None:
    began = time.monotonic()
    try:
        for site in pair.sites:
            await site.wait_until_empty(WHOLE_TIMEOUT_S)
    except NotReached:
        return None
    return round(time.monotonic() - began, 3)
