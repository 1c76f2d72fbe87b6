"""Sums the outcomes of many schedules."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.plan import Plan
from tests.simulation.simulation import Outcome


@dataclass
class Tally:
    num_schedules: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    endings: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[Outcome] = field(default_factory=list)

    def record(self, plan: Plan, outcome: Outcome) -> None:
        self.num_schedules += 1
        self.virtual_s += outcome.virtual_s
        self.endings += outcome.endings
        self.faults.update(fault.kind for fault in plan.faults)
        if outcome.wrongs:
            self.failed.append(outcome)

    def add(self, other: Tally) -> None:
        self.num_schedules += other.num_schedules
        self.virtual_s += other.virtual_s
        self.cpu_s += other.cpu_s
        self.endings += other.endings
        self.faults += other.faults
        self.failed += other.failed
