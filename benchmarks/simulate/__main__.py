"""Placement, the fair queue and the index at a scale beyond any test machine, on a virtual clock.

The scheduler's and the index's own code place a trace's requests on a fleet whose engines and links
are formulas (`sites.py`); compared with the same fleet placed by round robin, by least load and by
prefix alone. Virtual-time figures do not depend on the machine; only the time of a decision does:
as it never waits, this is its CPU time (measured by wall time, as the CPU clock takes up to 50 µs
to read on a virtual machine), without the slowest hundredth, when the machine did something else. A
decision is everything that the scheduler computes for a request besides messages: enqueue, dequeue,
placement, bookkeeping.

    python -m benchmarks.simulate [--scale 1.0] [--only CASE ...]
    python -m benchmarks.simulate --trace FILE --per-site-rate 1.5     # Mooncake's JSON lines

`--scale` shortens every case; with less than 1 the results are printed and not written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks.report import Bar, Row, at_least, at_most, print_tables, write_result
from benchmarks.simulate.figures import Figures, figures_of
from benchmarks.simulate.plots import plot
from benchmarks.simulate.policies import Hearth, LeastLoaded, Policy, PrefixOnly, RoundRobin
from benchmarks.simulate.simulation import FLOODER, FleetShape, Outcome, Simulation
from benchmarks.simulate.trace import TraceRequest, read_trace
from benchmarks.simulate.workloads import agents, conversations, flood, hot_prefix, spread
from services.scheduler import cost_kernel

MAX_DECISION_US = 100.0


@dataclass
class Case:
    """The results of one workload, by policy."""

    name: str
    rows: list[Row] = field(default_factory=list)
    figures: dict[str, Figures] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def run(
        self, label: str, shape: FleetShape, policy: Policy, trace: Iterable[TraceRequest]
    ) -> Figures:
        print(f"{self.name}: {label}", file=sys.stderr, flush=True)
        outcome = Simulation(shape, policy).run(trace)
        figures = figures_of(outcome)
        self.outcomes[label], self.figures[label] = outcome, figures
        num_workers = shape.num_prefill + shape.num_decode
        self.rows.append(
            {"case": self.name, "policy": label, "workers": num_workers, **figures.row()}
        )
        return figures


def hearth() -> Hearth:
    return Hearth(Random(0).randrange)


def run_spread(scale: float) -> tuple[Case, list[Bar]]:
    """Simulates 1,000 workers, prompts of 256 to 25,600 tokens at four fifths of the
    prefill capacity.
    """
    case, shape = Case("spread"), FleetShape(500, 500)
    for policy in (hearth(), LeastLoaded(), PrefixOnly(), RoundRobin()):
        case.run(policy.name, shape, policy, spread(round(200_000 * scale), 850))
    ours, theirs = case.figures["hearth"], case.figures["round robin"]
    return case, [
        at_least("p99 TTFT, round robin's to ours", theirs.ttft_p99_s / ours.ttft_p99_s, 2.0, "x"),
        at_most("CPU per decision, 1,000 workers", ours.decision_us, MAX_DECISION_US, "us"),
    ]


def run_hot_prefix(scale: float) -> tuple[Case, list[Bar]]:
    case, shape = Case("hot prefix"), FleetShape(100, 100)
    for policy in (hearth(), LeastLoaded(), PrefixOnly(), RoundRobin()):
        case.run(policy.name, shape, policy, hot_prefix(round(60_000 * scale), 200))
    ours, theirs = case.figures["hearth"], case.figures["prefix only"]
    ratio = ours.goodput_per_s / max(theirs.goodput_per_s, 1e-9)
    return case, [at_least("goodput, ours to prefix only's", ratio, 1.3, "x")]


def run_agents(scale: float) -> tuple[Case, list[Bar]]:
    """Simulates agents. Without affinity, neither sessions nor prefixes attract requests to a
    worker.
    """
    case, shape = Case("agents"), FleetShape(60, 60)
    for policy in (hearth(), LeastLoaded(), PrefixOnly(), RoundRobin()):
        case.run(policy.name, shape, policy, agents(round(5000 * scale), 5.0))
    return case, [
        at_most("hit ratio without affinity", case.figures["least loaded"].hit_ratio, 0.6, ""),
        at_least("hit ratio with affinity", case.figures["hearth"].hit_ratio, 0.8, ""),
    ]


def run_fairness(scale: float) -> tuple[Case, list[Bar]]:
    """Normals use half of the prefill capacity, one flooder sends five times as many tokens."""
    case, shape = Case("fairness"), FleetShape(20, 20)
    capacity = shape.num_prefill / shape.costs.prefill_s(1385)  # requests/s of the mean length
    num_normal, per_s = max(2000, round(10_000 * scale)), capacity / 2
    flood_per_s = 5 * per_s * 1385 / 2048
    for label, rate in (("without", 0.0), ("flooded", flood_per_s)):
        trace = flood(num_normal, per_s, rate, flooder=FLOODER)
        case.run(label, shape, hearth(), trace)
    ratio = case.figures["flooded"].normal_ttft_p99_s / case.figures["without"].normal_ttft_p99_s
    return case, [
        at_most("normals' p99 TTFT, flooded to not", ratio, 1.5, "x"),
        at_least("normal requests", float(num_normal), 2000.0, ""),
    ]


def run_million(scale: float) -> tuple[Case, list[Bar]]:
    """Lengths and sharing as in Mooncake's trace of conversations, on 2,000 workers."""
    case, shape = Case("million"), FleetShape(1000, 1000)
    num_requests = round(1_000_000 * scale)
    figures = case.run("hearth", shape, hearth(), conversations(num_requests, 1200))
    return case, [at_least("requests that ended", figures.num_requests, num_requests, "")]


def run_uneven(scale: float) -> tuple[Case, list[Bar]]:
    """Simulates `spread` with sites of half to double the speed, which a policy has to learn."""
    case, shape = Case("uneven sites"), FleetShape(100, 100, spread_of_speed=2.0)
    for policy in (hearth(), LeastLoaded(), RoundRobin()):
        case.run(policy.name, shape, policy, spread(round(40_000 * scale), 150))
    return case, []


CASES = {
    "fairness": run_fairness,
    "spread": run_spread,
    "hot-prefix": run_hot_prefix,
    "agents": run_agents,
    "uneven": run_uneven,
    "million": run_million,
}


def run_trace(path: Path, per_site_rate: float) -> Case:
    """Simulates a recorded trace on as many sites as its rate requires."""
    requests = list(read_trace(path))
    lasted_s = max(1.0, requests[-1].at_s - requests[0].at_s)
    num_sites = max(1, round(len(requests) / lasted_s / per_site_rate))
    case, shape = Case(path.stem), FleetShape(num_sites, num_sites)
    for policy in (hearth(), LeastLoaded(), PrefixOnly(), RoundRobin()):
        case.run(policy.name, shape, policy, requests)
    return case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--per-site-rate", type=float, default=1.0)
    options = parser.parse_args()
    cost_kernel.load()  # as a scheduler does once it has a worker
    if options.trace is not None:
        case = run_trace(options.trace, options.per_site_rate)
        print_tables(case.name, case.rows, [])
        return
    cases, bars = [], list[Bar]()
    for name in options.only:
        case, found = CASES[name](options.scale)
        print_tables(case.name, case.rows, found)
        cases.append(case)
        bars += found
    if options.scale < 1:
        return
    suffix = "" if len(options.only) == len(CASES) else "_" + "_".join(options.only)
    name = f"simulate{suffix}".replace("-", "_")
    rows = [row for case in cases for row in case.rows]
    write_result(name, rows, bars, ["-m", "benchmarks.simulate", *sys.argv[1:]])
    plot(name, {case.name: case.outcomes for case in cases})


if __name__ == "__main__":
    main()
