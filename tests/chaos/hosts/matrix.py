"""All rows of hosts on one site, and their bars."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report import Bar, at_most
from tests.chaos.hosts.rows import HOST_FAULTS, HOST_PHASES, HostRow, run_host_row
from tests.chaos.hosts.site import running_site
from tests.chaos.hosts.streams import Streams

MAX_SETTLED_S = 10.0


async def run_hosts(folder: Path, rows: list[HostRow]) -> None:
    """Adds each row to `rows`, and prints it."""
    async with running_site(folder) as site:
        streams = Streams(site)
        await streams.learn()
        for fault in HOST_FAULTS:
            for phase in HOST_PHASES:
                rows.append(await run_host_row(streams, fault, phase))
                print(rows[-1], flush=True)


def host_bars(rows: list[HostRow]) -> list[Bar]:
    def total(name: str) -> int:
        return sum(getattr(each, name) for each in rows)

    settled = [each.settled_after_s for each in rows if each.settled_after_s is not None]
    return [
        at_most("lost", total("lost"), 0, "requests"),
        at_most("altered", total("altered"), 0, "answers"),
        at_most("workers without a host", total("orphans"), 0, "processes"),
        at_most("workers of one model beyond one", total("doubled"), 0, "workers"),
        at_most("workers that a thawed host ended", total("replaced"), 0, "workers"),
        at_most("memory beyond the budget", total("over_budget_bytes"), 0, "bytes"),
        at_most("models that do not wake again", total("not_woken"), 0, "models"),
        at_most("hosts that do not settle", len(rows) - len(settled), 0, "rows"),
        at_most("fault to settled", max(settled, default=0.0), MAX_SETTLED_S, "s"),
    ]
