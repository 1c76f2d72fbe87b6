"""Two linked sites of real processes, and load for one of them.

The prefill worker of a site, on the stated device of benchmarks/roles/role_trace.py, limits it; its
capacity is measured first, alone and saturated. A request is good if its first token comes within
3 s and later ones every 60 ms or less on average. A scheduler queues the requests of a second; what
comes on top is rejected. A site alone is the same site while its link is cut.

- below its capacity: how many requests stay at home, and whether the other site costs them time,
  in turns
- overloaded by 2 x: goodput beside that of the site alone, and beside that of the workers of both
  places on one bus
- the demo model, small: the tokens of requests that leave are those that the site alone gives
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from benchmarks.report import Bar, Row, at_least, at_most
from benchmarks.sites.live_load import Load, completed_per_s, row_of, send_all
from benchmarks.sites.live_sites import (
    MAX_QUEUED,
    WORKER_ROLES,
    LinkedSites,
    linked_sites,
    model_command,
    shared_bus,
    timing_command,
)
from tests.support.cluster.clients import Exchange

SATURATING = Load(12.0, 12.0, 896, 32)
BELOW, BELOW_S = 0.6, 15.0  # of the capacity, and for how long a turn
ABOVE, ABOVE_S = 2.0, 30.0
NUM_TURNS = 2  # of each
SMALL = Load(12.0, 2.0, 120, 96)  # of the demo model
HOME_KV_BYTES, OTHER_KV_BYTES = 60 * 49152, 2048 * 49152  # home has room for few requests
Result = tuple[list[Row], list[Bar]]


def run(scale: float) -> Result:
    """`scale` shortens the loads, whose rates stay."""
    return uvloop.run(_measure(scale))


async def _measure(scale: float) -> Result:
    rows, bars = await _timed(scale)
    more_rows, more_bars = await _tokens()
    return rows + more_rows, bars + more_bars


async def _timed(scale: float) -> Result:
    commands = {role: timing_command(role) for role in WORKER_ROLES}
    with tempfile.TemporaryDirectory(prefix="hearth-sites-") as folder:
        async with linked_sites(Path(folder), commands, commands, max_queued=MAX_QUEUED) as sites:
            await sites.join(is_linked=False)
            saturating = await send_all(sites.home, SATURATING)
            capacity = completed_per_s(saturating, SATURATING)
            below = replace(SATURATING, per_s=BELOW * capacity, duration_s=scale * BELOW_S)
            above = replace(SATURATING, per_s=ABOVE * capacity, duration_s=scale * ABOVE_S)
            rows, bars = await _below(sites, below)
            linked, alone = await _above(sites, above)
    with tempfile.TemporaryDirectory(prefix="hearth-sites-") as folder:
        async with shared_bus(Path(folder), commands, max_queued=MAX_QUEUED) as target:
            await send_all(target, below)  # it learns the speeds, too
            shared = row_of("2 x, one bus", await send_all(target, above), above)
    saturated = row_of("saturated, alone", saturating, SATURATING)
    found = [saturated, *rows, alone, linked, shared]
    return found, [*bars, *_above_bars(found, capacity)]


async def _below(sites: LinkedSites, load: Load) -> Result:
    found: dict[bool, list[Exchange]] = {True: [], False: []}
    for is_linked in (False, True, True, False):
        await sites.join(is_linked=is_linked)
        found[is_linked] += await send_all(sites.home, load)
    await sites.join(is_linked=True)
    linked = row_of("below, linked", found[True], load, num_turns=NUM_TURNS)
    alone = row_of("below, alone", found[False], load, num_turns=NUM_TURNS)
    at_home = share_at_home(linked)
    p50, p50_alone = linked["TTFT p50 ms"], alone["TTFT p50 ms"]
    most = max(1.05 * p50_alone, p50_alone + 5)
    return [alone, linked], [
        at_least("below capacity: requests that stay at home", at_home, 0.95, "of all"),
        at_most("below capacity: TTFT p50 beside the site alone", p50, most, "ms"),
    ]


def share_at_home(row: Row) -> float:
    """Returns the share of all requests: one that has no answer stays nowhere."""
    num_ended = row["requests"] - row["rejected"] - row["failed"]
    return float((num_ended - row["far"]) / row["requests"])


async def _above(sites: LinkedSites, load: Load) -> tuple[Row, Row]:
    linked = row_of("2 x, linked", await send_all(sites.home, load), load)
    await sites.join(is_linked=False)
    return linked, row_of("2 x, alone", await send_all(sites.home, load), load)


def _above_bars(rows: list[Row], capacity: float) -> list[Bar]:
    """Home alone counts with all that it completes, in time or not, if that is more."""
    *_, alone, linked, shared = rows
    at_home = max(alone["goodput/s"], capacity)
    goodput = linked["goodput/s"]
    failed = sum(each["failed"] for each in rows)
    return [
        at_least("2 x: goodput over that of home alone", goodput / at_home, 1.6, "x"),
        at_least("2 x: goodput over that on one bus", goodput / shared["goodput/s"], 1.2, "x"),
        at_most("failed", failed, 0, "requests"),
    ]


async def _tokens() -> Result:
    with tempfile.TemporaryDirectory(prefix="hearth-sites-") as folder:
        home, other = (
            {role: model_command(role, kv_cache_bytes=num_bytes) for role in WORKER_ROLES}
            for num_bytes in (HOME_KV_BYTES, OTHER_KV_BYTES)
        )
        async with linked_sites(Path(folder), home, other) as sites:
            await sites.join(is_linked=True)
            linked = await send_all(sites.home, SMALL)
            await sites.join(is_linked=False)
            alone = await send_all(sites.home, SMALL)
    row = row_of("demo model, linked", linked, SMALL)
    return [row], [
        at_least("demo model: requests that leave", row["far"], 1, "requests"),
        at_most("demo model: other tokens than at home", num_altered(linked, alone), 0, "requests"),
    ]


def num_altered(found: Sequence[Exchange], expected: Sequence[Exchange]) -> int:
    pairs = zip(found, expected, strict=True)
    return sum(not a.is_successful or a.output != b.output for a, b in pairs)
