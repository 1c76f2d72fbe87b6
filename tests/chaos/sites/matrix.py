"""All rows of links and sites, and their bars."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from benchmarks.report import Bar, at_most
from tests.chaos.sites.pair import HOMES, running_pair
from tests.chaos.sites.rows import SiteRow, run_site_row
from tests.chaos.sites.streams import FarStreams

STEP_S = 0.1
NUM_STREAMS, NUM_OUTPUT_TOKENS = 32, 100  # 10 s: a fault finds all of them running
MAX_JOINED_S = 5.0


async def run_sites(folder: Path, rows: list[SiteRow], faults: Collection[str]) -> None:
    """Adds each row to `rows`, and prints it."""
    for home in HOMES:
        own_folder = folder / home.replace(" ", "-")
        own_folder.mkdir()
        async with running_pair(own_folder, home, step_s=STEP_S) as pair:
            streams = FarStreams(pair, NUM_STREAMS, NUM_OUTPUT_TOKENS)
            await streams.learn()
            for fault in faults:
                rows.append(await run_site_row(streams, fault, home))
                print(rows[-1], flush=True)


def site_bars(rows: list[SiteRow]) -> list[Bar]:
    joined = [each.joined_s for each in rows if each.joined_s is not None]
    crossed = [each.states_s for each in rows if each.states_s is not None]
    own_failed = sum(each.own_failed for each in rows if each.spares_own)
    never = sum(each.stays_apart for each in rows)
    leaking = sum(each.whole_after_s is None for each in rows)
    return [
        at_most("links and sites: lost", sum(each.lost for each in rows), 0, "requests"),
        at_most("links and sites: altered", sum(each.altered for each in rows), 0, "answers"),
        at_most("own requests that failed without a link", own_failed, 0, "requests"),
        at_most("sites that do not join again", never, 0, "rows"),
        at_most("pools of sites that are not whole afterwards", leaking, 0, "rows"),
        at_most(
            "end of a fault to a request over the link", max(joined, default=0), MAX_JOINED_S, "s"
        ),
        at_most(
            "end of a fault to states of both sites", max(crossed, default=0), MAX_JOINED_S, "s"
        ),
    ]
