"""ITL of running streams beside long prompts: workers of both roles against split ones.

    python -m benchmarks.roles.colocation           real processes, an L40S
    python -m benchmarks.roles.colocation --virtual services in virtual time, an H100

Two devices each: two workers of both roles, at several chunk sizes (tokens of a step), or one that
prefills and one that decodes. In real processes (`real_fleet.py`) a worker sleeps for the time of
a step, so the device is one whose steps are long beside what two cores add to them; in virtual time
(`virtual_fleet.py`) nothing is added. A device runs Llama 3.1 8B in BF16, by the roofline with half
of the peak FLOP/s and three quarters of the peak bandwidth:

                                                    H100: 989e12, 3.35e12   L40S: 362e12, 864e9
    a token     2 x 8.03e9 FLOP / (FLOP/s x 0.5)    32.5 us                 88.7 us
    a step      16.06e9 B of weights / (B/s x 0.75) 6.4 ms                  24.8 ms
    a context   131,072 B of KV / (B/s x 0.75)      52 ns a token           202 ns a token

The time of a step is stated in two ways. `overlap` is the ideal device: the larger of reading the
weights and computing the tokens, plus reading the KV. `sum` adds all three, as a device does whose
kernels do not overlap; it is the linear model that the scheduler fits to real workers.

32 streams run all the time (256 tokens in; each ends after 256 and the next one begins) while
prompts of 8,128 tokens arrive (Poisson, two thirds of what a device computes), with 32 tokens out.
The best chunk size is that with the lowest p90 ITL of the streams among those with which long
prompts have their first token as soon as with split workers (p90 TTFT); without this condition the
smallest chunk always wins.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.report import RESULTS, Row, at_least, write_result
from benchmarks.roles.colocation_plot import svg_of
from benchmarks.roles.real_fleet import run_real_fleet
from benchmarks.roles.step_costs import OverlapCost
from benchmarks.roles.virtual_fleet import Arrival, FleetOptions, FleetRun, run_fleet
from services.client.load_test import percentile
from shared.engine.executors.timing_executor import StepCost
from shared.messages import Role
from shared.telemetry.log import configure_logging

CHUNKS = (64, 128, 256, 512, 1024, 2048)
SPLIT: tuple[tuple[Role, ...], ...] = (("prefill",), ("decode",))
TOGETHER: tuple[tuple[Role, ...], ...] = (("prefill", "decode"), ("prefill", "decode"))
NUM_STREAMS, PROMPT_TOKENS, STREAM_TOKENS = 32, 8128, 256  # a prompt and its output: 8,192
WARM_UP_S = 2.0  # gaps within it do not count
COSTS: dict[str, type[StepCost]] = {"overlap": OverlapCost, "sum": StepCost}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    step_s: float
    token_s: float
    context_token_s: float
    num_blocks: int
    prompts_per_s: float
    stream_s: float  # how long a stream runs, about

    def cost(self, kind: str) -> StepCost:
        return COSTS[kind](self.step_s, self.token_s, self.context_token_s)


H100 = Device(
    step_s=6.4e-3,
    token_s=32.5e-6,
    context_token_s=52e-9,
    num_blocks=24_576,
    prompts_per_s=2.5,
    stream_s=2.5,
)
L40S = Device(
    step_s=24.8e-3,
    token_s=88.7e-6,
    context_token_s=202e-9,
    num_blocks=12_288,
    prompts_per_s=0.9,
    stream_s=8.0,
)


def arrivals(device: Device, duration_s: float, seed: int) -> list[Arrival]:
    random, now = Random(seed), 0.0
    gap_s = device.stream_s / NUM_STREAMS
    num_streams = int(duration_s / device.stream_s) * NUM_STREAMS
    found = [Arrival(n * gap_s, 256, STREAM_TOKENS, "stream") for n in range(num_streams)]
    while (now := now + random.expovariate(device.prompts_per_s)) < duration_s:
        found.append(Arrival(now, PROMPT_TOKENS, 32, "prompt"))
    return sorted(found, key=lambda each: each.at_s)


def measure(
    workers: tuple[tuple[Role, ...], ...], cost: str, chunk: int, options: argparse.Namespace
) -> Row:
    device, run_on = (H100, run_fleet) if options.virtual else (L40S, run_real_fleet)
    fleet = FleetOptions(
        workers=workers,
        cost=device.cost(cost),
        num_blocks=device.num_blocks,
        max_batch_tokens=chunk,
    )
    run = run_on(fleet, arrivals(device, options.seconds, seed=1))
    gaps, first = stream_gaps(run), prompt_ttfts(run)
    return {
        "workers": "split" if workers == SPLIT else "both roles",
        "step time": cost,
        "chunk tokens": chunk,
        **{f"ITL p{p} ms": round(1e3 * percentile(gaps, p), 2) for p in (50, 90, 99)},
        **{f"TTFT p{p} s": round(percentile(first, p), 3) for p in (50, 90)},
        "prompts": len(first),
        "lost": sum(not each.is_finished for each in run.timelines),
    }


def stream_gaps(run: FleetRun) -> list[float]:
    own = (each for each in run.timelines if each.arrival.kind == "stream")
    return [gap for each in own if each.arrival.at_s >= WARM_UP_S for gap in each.gaps_s]


def prompt_ttfts(run: FleetRun) -> list[float]:
    own = (each for each in run.timelines if each.arrival.kind == "prompt")
    return [each.ttft_s for each in own if each.token_times]


def split_row(rows: Sequence[Row], cost: str) -> Row:
    (found,) = (row for row in rows if (row["workers"], row["step time"]) == ("split", cost))
    return found


def best(rows: Sequence[Row], cost: str) -> Row | None:
    limit_s = split_row(rows, cost)["TTFT p90 s"]
    own = [row for row in rows if (row["workers"], row["step time"]) == ("both roles", cost)]
    fast = [row for row in own if row["TTFT p90 s"] <= limit_s]
    return min(fast, key=lambda row: row["ITL p90 ms"], default=None)


def ratio(rows: Sequence[Row], cost: str) -> float:
    """Over split workers at the same step times; 0 if no chunk size is fast enough."""
    found = best(rows, cost)
    return 0.0 if found is None else found["ITL p90 ms"] / split_row(rows, cost)["ITL p90 ms"]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=32.0)
    parser.add_argument("--virtual", action="store_true")
    options = parser.parse_args(argv)
    configure_logging("benchmark", level="error")  # not of each request
    rows = []
    for cost in COSTS:
        cases = [(SPLIT, 2048), *((TOGETHER, chunk) for chunk in CHUNKS)]
        for workers, chunk in cases:
            began = time.monotonic()
            rows.append(measure(workers, cost, chunk, options))
            print(f"{time.monotonic() - began:.0f} s  {rows[-1]}", file=sys.stderr, flush=True)
    bars = [
        at_least(
            f"p90 ITL, both roles at their best chunk size over split, step time by {cost}",
            ratio(rows, cost),
            3.0,
            "x",
        )
        for cost in COSTS
    ]
    name = "colocation_virtual" if options.virtual else "colocation"
    write_result(name, rows, bars, ["-m", "benchmarks.roles.colocation", *argv])
    (RESULTS / f"{name}.svg").write_text(svg_of(rows))
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
