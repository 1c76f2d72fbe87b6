"""Restarted processes and rejected requests, in a line of text."""

from __future__ import annotations

from collections.abc import Sequence

from services.cli.fleet.times import since
from services.local.processes.supervision_log import Restarts
from shared.fleet.read_fleet import RejectedCode, Rejection


def restarts_text(restarts: Sequence[Restarts], wall_s: float) -> str:
    """Returns the processes with the number and the last time of their restarts."""
    return ", ".join(
        f"{each.process_id} ({each.number}, last {since(wall_s - each.last_at, wall_s)})"
        for each in restarts
    )


def rejections_text(rejected: Sequence[Rejection]) -> str:
    """Returns the error codes with the number of their requests at all gateways, most first."""
    counts: dict[str, int] = {}
    for each in rejected:
        counts[each.code] = counts.get(each.code, 0) + each.count
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {code}" for code, count in ordered)


def day_text(rejected: Sequence[RejectedCode], wall_s: float) -> str:
    """Returns the error codes with the number and the times of their requests, most first."""
    return ", ".join(
        f"{each.count:,} {each.code} ({_span(each, wall_s)})"
        for each in sorted(rejected, key=lambda each: -each.count)
    )


def _span(rejected: RejectedCode, wall_s: float) -> str:
    first, last = (since(wall_s - at, wall_s) for at in (rejected.first_at, rejected.last_at))
    return first if first == last else f"{first} to {last}"
