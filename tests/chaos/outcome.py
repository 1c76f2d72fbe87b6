"""The results of a run of faults, and its bars."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.report import Bar, at_least, at_most
from tests.chaos.frames import FrameRow
from tests.chaos.hosts.matrix import host_bars
from tests.chaos.hosts.rows import HostRow
from tests.chaos.rows import Fault, Row
from tests.chaos.sites.matrix import site_bars
from tests.chaos.sites.rows import SiteRow

FAULTS: tuple[Fault, ...] = ("kill", "freeze", "device", "drain")
MAX_DETECT_S = {"kill": 0.5, "freeze": 1.5, "device": 0.5, "drain": 0.5}
MAX_EXCESS_S = {"kill": 1.0, "freeze": 2.0, "device": 1.0, "drain": 2.0}


@dataclass
class Outcome:
    rows: list[Row] = field(default_factory=list)
    frames: list[FrameRow] = field(default_factory=list)
    hosts: list[HostRow] = field(default_factory=list)
    sites: list[SiteRow] = field(default_factory=list)
    leftovers: dict[str, dict[str, int]] = field(default_factory=dict)  # by process
    num_left: int = 0  # clients that left before their responses
    num_restarted: int = 0
    num_unclean: int = 0  # processes that did not exit with status 0
    longest_drain_s: float = 0.0
    failed_in_restart: int = 0  # requests sent meanwhile

    @property
    def is_bad(self) -> bool:
        has_bad_row = any(
            row.is_bad for row in (*self.rows, *self.frames, *self.hosts, *self.sites)
        )
        return has_bad_row or bool(self.leftovers or self.num_unclean or self.failed_in_restart)


def bars_of(outcome: Outcome) -> list[Bar]:
    """The bars of the parts that ran."""
    bars = [bar for fault in FAULTS for bar in _fault_bars(fault, outcome.rows)]
    if outcome.rows:
        bars += _row_bars(outcome)
    if outcome.frames:
        bars += _frame_bars(outcome.frames)
    if outcome.hosts:
        bars += host_bars(outcome.hosts)
    if outcome.sites:
        bars += site_bars(outcome.sites)
    if outcome.num_restarted:
        bars += _restart_bars(outcome)
    return bars


def _fault_bars(fault: Fault, rows: list[Row]) -> list[Bar]:
    of_fault = [row for row in rows if row.fault == fault]
    detect_s = [row.detect_s for row in of_fault if row.detect_s is not None]
    excess_s = [row.excess_s - (row.outage_s or 0.0) for row in of_fault]
    bars = []
    if detect_s:
        name = f"{fault}: fault to resubmission"
        bars.append(at_most(name, max(detect_s), MAX_DETECT_S[fault], "s"))
    if excess_s:
        name = f"{fault}: pause less recomputation and outage"
        bars.append(at_most(name, max(excess_s), MAX_EXCESS_S[fault], "s"))
    return bars


def _row_bars(outcome: Outcome) -> list[Bar]:
    rows = outcome.rows
    suspected = sum(row.suspected for row in rows)
    unmoved = sum(not row.moved for row in rows)
    leaking = sum(row.whole_after_s is None for row in rows)
    held = f"still held after all rows and {outcome.num_left} cancels"
    return [
        at_most("lost", sum(row.lost for row in rows), 0, "requests"),
        at_most("altered", sum(row.altered for row in rows), 0, "answers"),
        at_most("suspicions of who had nothing done to it", suspected, 0, "suspicions"),
        at_most("faults that move no metric of their runbook line", unmoved, 0, "rows"),
        at_most("pools that are not whole afterwards", leaking, 0, "rows"),
        at_most(held, len(outcome.leftovers), 0, "processes"),
    ]


def _frame_bars(rows: list[FrameRow]) -> list[Bar]:
    missed = sum(row.missed for row in rows)
    wrong = sum(row.lost + row.altered for row in rows)
    return [
        at_least("KV frames spoilt", sum(row.spoilt for row in rows), 100, "frames"),
        at_most("of them neither found nor counted", missed, 0, "frames"),
        at_most("answers lost or altered by them", wrong, 0, "answers"),
    ]


def _restart_bars(outcome: Outcome) -> list[Bar]:
    name = f"rolling restart of {outcome.num_restarted} processes under load"
    return [
        at_most(name, outcome.failed_in_restart, 0, "failed requests"),
        at_most("unclean ends", outcome.num_unclean, 0, "processes"),
        at_most("longest drain", outcome.longest_drain_s, 10.0, "s"),
    ]
