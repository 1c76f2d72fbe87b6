"""Which models are hot, simulated: the scheduler's policy beside plain LRU and fixed models.

A day: 50 models on 8 devices, bursty traffic by Zipf's law. Each device has memory for 3 hot models
of 5 resident ones, or 2 of 6. `dedicated` serves the 8 most popular models of the day, each alone
on a device; `fixed` as many as fit hot, 24, chosen in hindsight. Both refuse all others. Goodput
counts the requests per second that met both targets.

8 models: those of `many_models.py`, at the speed of one CPU device, with memory for 2 hot ones.

Wake and start times come from `results/cold_start.json`: for 8 models those of its 125 M, for the
day those of its 0.6 B; without that file they are STANDBY_S and COLD_S, with which the 8 models run
too. Times are virtual; the figures do not depend on the machine.

    python -m benchmarks.residency [--hours 24] [--only day]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.report import RESULTS, Bar, Row, at_least, at_most, write_result
from benchmarks.residency.simulation import FixedPolicy, FleetShape, Outcome, Simulation
from benchmarks.residency.sites import Speed
from benchmarks.residency.trace import Trace, bursty_day, steady
from services.scheduler.residency.demand_policy import DemandPolicy
from services.scheduler.residency.lru_policy import LruPolicy
from services.scheduler.residency.view import Policy

GB = 10**9
STANDBY_S, COLD_S = 0.25, 3.0
NUM_DEVICES, NUM_MODELS = 8, 50
WEIGHTS, FLOOR, BUDGET = 5 * GB, 9 * GB, 52 * GB
TTFT_S, ITL_S = 2.0, 0.1  # the targets of goodput
GATHERING_S = 3.4  # the scheduler's --wake-ttft-s for 8 models
# of one device, for one model: a step of 20 ms and 0.8 ms a sequence, 5,000 prompt tokens/s
DEVICE = {"step_s": 0.02, "sequence_s": 0.0008, "token_s": 1 / 5000, "max_sequences": 48}
# 125 M in BF16 on 2 cores (`engine_cpu.json`): 75 tokens/s alone, 1,770 in a batch of 64
CPU = {"step_s": 0.013, "sequence_s": 0.0003, "token_s": 1 / 4600, "max_sequences": 64}


def measured_times(model: str, path: Path = RESULTS / "cold_start.json") -> tuple[float, float]:
    """Returns the seconds from standby and from cold to the first token, beyond a hot model's; no
    less than the wake alone took.
    """
    if not path.exists():
        return STANDBY_S, COLD_S
    rows = msgspec.json.decode(path.read_bytes())["rows"]
    of_model = {row["case"]: row for row in rows if row["model"] == model}
    hot_s = of_model["hot"]["first_token_s"]
    standby, cold = of_model["standby"], of_model["cold"]
    wake_s = max(standby["wake_s"], standby["first_token_s"] - hot_s)
    return wake_s, cold["first_token_s"] - hot_s


def row_of(case: str, label: str, outcome: Outcome) -> Row:
    return {
        "case": case,
        "policy": label,
        "requests": outcome.num_requests,
        "failed": outcome.num_failed,
        "goodput_per_s": round(outcome.goodput_per_s(ttft_s=TTFT_S, itl_s=ITL_S), 3),
        "ttft_p50_s": round(outcome.ttft_percentile(50), 2),
        "ttft_p99_s": round(outcome.ttft_percentile(99), 2),
        "itl_p50_ms": round(1e3 * float(np.percentile(outcome.itl_s, 50)), 1),
        "wakes": outcome.num_wakes,
        "decisions": outcome.num_decisions,
        "cpu_s": round(outcome.cpu_s, 1),
    }


class Case:
    def __init__(self, name: str, trace: Trace) -> None:
        self.name, self._trace = name, trace
        self.rows: list[Row] = []
        self.outcomes: dict[str, Outcome] = {}

    def run(self, label: str, shape: FleetShape, policy: Policy) -> None:
        print(f"{self.name}: {label}", file=sys.stderr, flush=True)
        self.outcomes[label] = Simulation(shape, policy).run(self._trace)
        self.rows.append(row_of(self.name, label, self.outcomes[label]))

    def goodput(self, label: str) -> float:
        return self.outcomes[label].goodput_per_s(ttft_s=TTFT_S, itl_s=ITL_S)

    def wakes_over_lru(self) -> float:
        return self.outcomes["demand"].num_wakes / max(1, self.outcomes["lru"].num_wakes)


def speed_of(name: str, costs: dict[str, float], times: tuple[float, float]) -> Speed:
    return Speed(name=name, wake_s=times[0], start_s=times[1], **costs)  # type: ignore[arg-type]


def simulated_day(hours: float, times: tuple[float, float]) -> tuple[list[Row], list[Bar]]:
    trace = bursty_day(
        num_models=NUM_MODELS,
        rate_per_s=5.0,
        mean_prompt_tokens=500,
        mean_output_tokens=300,
        duration_s=3600 * hours,
    )
    counts = np.bincount(trace.model, minlength=NUM_MODELS)
    popular = np.argsort(-counts).tolist()
    places = range(NUM_DEVICES)
    alone = [[popular[each]] for each in places]
    fit = BUDGET // (WEIGHTS + FLOOR)
    fixed = [[popular[each + rank * NUM_DEVICES] for rank in range(fit)] for each in places]
    standby = [
        [model for model in range(NUM_MODELS) if model % NUM_DEVICES == each][:5] for each in places
    ]
    speed, case = speed_of("edge", DEVICE, times), Case("day", trace)
    case.run("demand", _day_shape(speed, standby), DemandPolicy(ttft_target_s=TTFT_S))
    case.run("lru", _day_shape(speed, standby), LruPolicy())
    case.run("dedicated", _day_shape(speed, alone, hot=alone), FixedPolicy())
    case.run("fixed", _day_shape(speed, fixed, hot=fixed), FixedPolicy())
    bars = [
        at_least(
            f"day: goodput over {label}'s", case.goodput("demand") / case.goodput(label), 1.3, "x"
        )
        for label in ("lru", "dedicated", "fixed")
    ]
    return case.rows, bars


def _day_shape(
    speed: Speed, standby: Sequence[Sequence[int]], hot: Sequence[Sequence[int]] = ()
) -> FleetShape:
    return FleetShape(
        speed=speed,
        budget_bytes=BUDGET,
        weights_bytes=WEIGHTS,
        kv_floor_bytes=FLOOR,
        num_models=NUM_MODELS,
        standby=standby,
        hot=hot,
    )


def eight_models(times: tuple[float, float]) -> tuple[list[Row], list[Bar]]:
    trace = steady(
        num_models=8,
        rate_per_s=10.0,
        duration_s=600.0,
        num_prompt_tokens=64,
        num_output_tokens=16,
    )
    shape = FleetShape(
        speed=speed_of("2 cores", CPU, times),
        budget_bytes=8 * WEIGHTS + 2 * FLOOR,
        weights_bytes=WEIGHTS,
        kv_floor_bytes=FLOOR,
        num_models=8,
        standby=[range(8)],
    )
    case = Case(f"8 models, wake {times[0]:g} s", trace)
    case.run("demand", shape, DemandPolicy(ttft_target_s=GATHERING_S))
    case.run("lru", shape, LruPolicy())
    p99_s = case.outcomes["demand"].ttft_percentile(99)
    return case.rows, [
        at_most(f"{case.name}: p99 TTFT", p99_s, 4.0, "s"),
        at_most(f"{case.name}: wakes over lru's", case.wakes_over_lru(), 0.5, "x"),
        at_most(f"{case.name}: lost", case.outcomes["demand"].num_failed, 0, "requests"),
    ]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.residency",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hours", type=float, default=24.0, help="of the day; less is not written")
    parser.add_argument("--only", choices=("day", "8"), help="one case; is not written")
    given = parser.parse_args(argv)
    rows, bars = list[Row](), list[Bar]()
    if given.only != "day":
        for each in (measured_times("125m"), (STANDBY_S, COLD_S)):
            more_rows, more_bars = eight_models(each)
            rows, bars = rows + more_rows, bars + more_bars
    if given.only != "8":
        more_rows, more_bars = simulated_day(given.hours, measured_times("0.6b"))
        rows, bars = rows + more_rows, bars + more_bars
    is_full = given.only is None and given.hours == 24.0
    write_result("residency", rows, bars, ["-m", "benchmarks.residency", *argv], is_full=is_full)
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
