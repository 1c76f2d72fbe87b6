"""ITL of running streams beside long prompts: workers of both roles against split ones.

    python -m benchmarks.roles.colocation

Real services in virtual time (`virtual_fleet.py`), two devices each: two workers of both roles, at
several chunk sizes (tokens of a step), or one that prefills and one that decodes. A device is an
H100 with Llama 3.1 8B in BF16, by the roofline with half of the peak FLOP/s and three quarters of
the peak bandwidth:

    a token     2 x 8.03e9 FLOP / (989e12 x 0.5)         32.5 us
    a step      16.06e9 B of weights / (3.35e12 x 0.75)  6.4 ms
    a context   131,072 B of KV / (3.35e12 x 0.75)       52 ns a token

The time of a step is stated in two ways. `overlap` is the ideal device: the larger of reading the
weights and computing the tokens, plus reading the KV. `sum` adds all three, as a device does whose
kernels do not overlap; it is the linear model that the scheduler fits to real workers.

32 streams run all the time (256 tokens in; each ends after 256 and the next one begins) while 2.5
prompts a second of 8,128 tokens arrive (Poisson), with 32 tokens out. The best chunk size is that
with the lowest p90 ITL of the streams among those with which long prompts have their first token as
soon as with split workers (p90 TTFT); without this condition the smallest chunk always wins.
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
from benchmarks.roles.virtual_fleet import Arrival, FleetOptions, FleetRun, run_fleet
from shared.engine.runner import StepInputs
from shared.engine.runners.timing_runner import StepCost
from shared.log import configure_logging
from shared.messages import Role

SUM = StepCost(base_s=6.4e-3, per_token_s=32.5e-6, per_context_token_s=52e-9)
CHUNKS = (64, 128, 256, 512, 1024, 2048)
SPLIT: tuple[tuple[Role, ...], ...] = (("prefill",), ("decode",))
TOGETHER: tuple[tuple[Role, ...], ...] = (("prefill", "decode"), ("prefill", "decode"))
NUM_STREAMS, PROMPTS_PER_S, PROMPT_TOKENS = 32, 2.5, 8128  # with the output within 8,192
STREAM_TOKENS, STREAM_S = 256, 2.5  # and about how long one of them runs
WARM_UP_S = 2.0  # whose gaps do not count


@dataclass(frozen=True, slots=True)
class OverlapCost(StepCost):
    """Reading weights and computing tokens overlap."""

    def of(self, inputs: StepInputs) -> float:
        num_tokens, num_context = len(inputs.input_ids), int(inputs.context_lens.sum())
        step_s = max(self.base_s, num_tokens * self.per_token_s)
        return step_s + num_context * self.per_context_token_s


COSTS = {
    "overlap": OverlapCost(SUM.base_s, SUM.per_token_s, SUM.per_context_token_s),
    "sum": SUM,
}


def arrivals(duration_s: float, seed: int) -> list[Arrival]:
    random, now = Random(seed), 0.0
    found = [
        Arrival(number * STREAM_S / NUM_STREAMS + turn * STREAM_S, 256, STREAM_TOKENS, "stream")
        for turn in range(int(duration_s / STREAM_S))
        for number in range(NUM_STREAMS)
    ]
    while (now := now + random.expovariate(PROMPTS_PER_S)) < duration_s:
        found.append(Arrival(now, PROMPT_TOKENS, 32, "prompt"))
    return sorted(found, key=lambda each: each.at_s)


def measure(workers: tuple[tuple[Role, ...], ...], cost: str, chunk: int, seconds: float) -> Row:
    options = FleetOptions(
        workers=workers, cost=COSTS[cost], num_blocks=24_576, max_batch_tokens=chunk
    )
    run = run_fleet(options, arrivals(seconds, seed=1))
    gaps, first = sorted(stream_gaps(run)), sorted(prompt_ttfts(run))
    return {
        "workers": "split" if workers == SPLIT else "both roles",
        "step time": cost,
        "chunk tokens": chunk,
        "ITL p50 ms": round(1e3 * gaps[len(gaps) // 2], 2),
        "ITL p90 ms": round(1e3 * gaps[int(0.9 * len(gaps))], 2),
        "ITL p99 ms": round(1e3 * gaps[int(0.99 * len(gaps))], 2),
        "TTFT p50 s": round(first[len(first) // 2], 3),
        "TTFT p90 s": round(first[int(0.9 * len(first))], 3),
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
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--name", default="colocation", help="results/NAME.json and .svg")
    options = parser.parse_args(argv)
    configure_logging("benchmark", level="error")  # not of each request
    rows = []
    for cost in COSTS:
        cases = [(SPLIT, 2048), *((TOGETHER, chunk) for chunk in CHUNKS)]
        for workers, chunk in cases:
            began = time.monotonic()
            rows.append(measure(workers, cost, chunk, options.seconds))
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
    write_result(options.name, rows, bars, ["-m", "benchmarks.roles.colocation", *argv])
    (RESULTS / f"{options.name}.svg").write_text(svg_of(rows))
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
