"""A trace that turns from prefill-heavy to decode-heavy: roles by themselves beside fixed ones.

    python -m benchmarks.roles.role_trace

Real services in virtual time (`virtual_fleet.py`), four workers with both handlers. A worker is
four A100 with Llama 3.1 70B in BF16 (TP 4), by the roofline with half of the peak FLOP/s and three
quarters of the peak bandwidth:

    a token     2 x 70.6e9 FLOP / (4 x 312e12 x 0.5)             226 us
    a step      141e9 B of weights / (4 x 2.04e12 B/s x 0.75)    23 ms
    a context   327,680 B of KV / (4 x 2.04e12 x 0.75)           54 ns a token

Each worker has a KV cache of 49,152 tokens and steps of at most 2,048 tokens. RATE requests a
second (Poisson) come all the time, no prompt twice: in the first half they read 896 tokens and
write 32, in the second they read 256 and write 400: the first asks for about 2.3 busy prefill
workers, the second for three decode workers to keep the ITL. Goodput counts requests whose first
token came within 2 s and whose mean ITL is at most 40 ms. Every fixed split, workers of both roles
(which are no split: without a bar), and automatic roles that start as two and two.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from random import Random
from typing import Any

from benchmarks.report import Row, at_least, at_most, write_result
from benchmarks.roles.virtual_fleet import Arrival, FleetOptions, FleetRun, Timeline, run_fleet
from services.client.load_test import percentile
from shared.engine.executors.timing_executor import StepCost
from shared.messages import Role
from shared.telemetry.log import configure_logging

DEVICE = StepCost(base_s=23e-3, per_token_s=226e-6, per_context_token_s=54e-9)
RATE = 11.0  # requests/s
NUM_WORKERS = 4
TTFT_S, ITL_S = 2.0, 0.040
P, D, BOTH = ("prefill",), ("decode",), ("prefill", "decode")
# tokens in, tokens out
PHASES = {"prefill-heavy": (896, 32), "decode-heavy": (256, 400)}


def arrivals(phase_s: float, seed: int) -> list[Arrival]:
    random, found, now = Random(seed), [], 0.0
    for number, (kind, (num_in, num_out)) in enumerate(PHASES.items(), start=1):
        while (now := now + random.expovariate(RATE)) < number * phase_s:
            found.append(Arrival(now, num_in, num_out, kind))
        now = number * phase_s
    return found


def fleets() -> dict[str, dict[str, Any]]:
    def split(num_prefill: int) -> tuple[tuple[Role, ...], ...]:
        return (P,) * num_prefill + (D,) * (NUM_WORKERS - num_prefill)

    fixed = {
        f"fixed {n} prefill, {NUM_WORKERS - n} decode": {"workers": split(n)}
        for n in range(1, NUM_WORKERS)
    }
    automatic = {"workers": split(2), "automatic_roles": "on", "role_change_min_s": 3.0}
    return {
        **fixed,
        "both roles each": {"workers": (BOTH,) * NUM_WORKERS},
        "by themselves": automatic,
    }


def row_of(name: str, run: FleetRun, phase_s: float) -> Row:
    row: Row = {"roles": name}
    for kind in PHASES:
        own = [each for each in run.timelines if each.arrival.kind == kind]
        met = sum(each.meets(TTFT_S, ITL_S) for each in own)
        row |= {
            f"{kind} goodput/s": round(met / phase_s, 2),
            f"{kind} TTFT p50 s": _rounded([e.ttft_s for e in own if e.token_times], 50),
            f"{kind} TTFT p90 s": _rounded([e.ttft_s for e in own if e.token_times], 90),
            f"{kind} ITL p90 ms": round(1e3 * _rounded(_mean_gaps(own), 90), 1),
        }
    met = sum(each.meets(TTFT_S, ITL_S) for each in run.timelines)
    return row | {
        "goodput/s": round(met / (len(PHASES) * phase_s), 3),
        "requests": len(run.timelines),
        "met": met,
        "lost": sum(not each.is_finished for each in run.timelines),
        "changes": len(run.roles) - 1,
        "history": [[at, ",".join(roles)] for at, roles in run.roles],
    }


def _mean_gaps(timelines: Sequence[Timeline]) -> list[float]:
    gaps = (each.gaps_s for each in timelines)
    return [statistics.fmean(each) for each in gaps if each]


def _rounded(values: Sequence[float], p: int) -> float:
    return round(percentile(values, p), 4) if values else 0.0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--phase-s", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="fleets whose name contains this; no result")
    parser.add_argument("--name", default="role_trace", help="results/NAME.json")
    options = parser.parse_args(argv)
    configure_logging("benchmark", level="error")  # not of each request
    rows, outputs = [], {}
    for name, fleet in fleets().items():
        if options.only not in name:
            continue
        began = time.monotonic()
        fleet_options = FleetOptions(
            cost=DEVICE, num_blocks=3072, max_batch_tokens=2048, target_itl_s=ITL_S, **fleet
        )
        run = run_fleet(fleet_options, arrivals(options.phase_s, options.seed))
        outputs[name] = [each.token_ids for each in run.timelines]
        rows.append(row_of(name, run, options.phase_s))
        print(f"{time.monotonic() - began:.0f} s  {rows[-1]}", file=sys.stderr, flush=True)
    if options.only:
        return 0
    return report(rows, outputs, options.name, argv)


def report(rows: list[Row], outputs: dict[str, list], name: str, argv: Sequence[str]) -> int:
    goodput = {row["roles"]: row["goodput/s"] for row in rows}
    best = max(value for roles, value in goodput.items() if roles.startswith("fixed"))
    own = goodput["by themselves"]
    altered = sum(
        a != b for a, b in zip(outputs[rows[0]["roles"]], outputs["by themselves"], strict=True)
    )
    bars = [
        at_least("goodput of roles by themselves over the best fixed split", own / best, 1.25, "x"),
        at_most("lost with automatic roles", rows[-1]["lost"], 0, "requests"),
        at_most("other tokens than with fixed roles", altered, 0, "requests"),
    ]
    write_result(name, rows, bars, ["-m", "benchmarks.roles.role_trace", *argv])
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
