"""Requests/s of one gateway by dialect and transport: chat, Workers AI, Messages, Responses (stored
or not), and chat over NATS.

    python -m benchmarks.serving.transports [--concurrency 16] [--duration-s 5] [--rounds 6]

A full cluster of real processes whose workers' steps take no time, as of
`benchmarks/control_plane.py`, with 500 tokens in and 32 out. Each round measures all by turns, with
prompts of their own; a ratio is the median over the rounds, since the speed of the machine changes
between rounds. Clients count events without parsing them. A client over NATS has a connection of
its own, as over HTTP, and its messages pass the nats-server that also carries the cluster's own.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.control_plane import SHAPES, cpu_s, prompts
from benchmarks.report import Bar, Row, at_least, at_most, write_result
from benchmarks.serving.closed_loop import RESPONSES, Tally, Target, load, num_events_of
from benchmarks.serving.cluster import SPLIT, TENANT, Processes, hearth

SHAPE = SHAPES["split"]
NAMES = ("chat", "workers_ai", "messages", "responses", "stored", "nats")
# requests/s over chat's
BARS = {"workers_ai": 0.9, "messages": 0.9, "responses": 0.8, "stored": 0.8, "nats": 1.2}
WARM_UP_S = 1.0


class Load:
    """One dialect and transport of a running cluster."""

    def __init__(self, name: str, target: Target, concurrency: int) -> None:
        self.name = name
        self._target = replace(target, **_changes(name, target))
        self._concurrency = concurrency
        self._num_events = 0

    async def count_events(self, prompt: str) -> None:
        """Events of one response, before all others."""
        num_tokens = SHAPE.num_output_tokens
        self._num_events = await num_events_of(self._target, prompt, num_tokens)

    async def run(self, source: Iterator[str], duration_s: float) -> Tally:
        return await load(
            self._target,
            source,
            concurrency=self._concurrency,
            duration_s=duration_s,
            num_output_tokens=SHAPE.num_output_tokens,
            num_events=self._num_events,
        )


def _changes(name: str, target: Target) -> dict[str, Any]:
    """Returns the fields of the target that differ from chat completions over HTTP."""
    if name == "nats":
        return {"is_nats": True}
    if name in ("responses", "stored"):
        return {"path": RESPONSES, "is_stored": name == "stored"}
    run = f"/client/v4/accounts/{TENANT}/ai/run/{target.model}"
    return {"path": {"workers_ai": run, "messages": "/v1/messages"}.get(name, target.path)}


async def measured(one: Load, processes: Processes, seed: int, duration_s: float) -> Row:
    source = prompts(SHAPE.num_input_tokens, seed)
    await one.count_events(next(source))
    await one.run(source, WARM_UP_S)
    before, started = cpu_s(processes), time.perf_counter()
    tally = await one.run(source, duration_s)
    elapsed_s, after = time.perf_counter() - started, cpu_s(processes)
    for fault in tally.faults[:3]:
        print(fault, file=sys.stderr)
    num = tally.num_requests
    spent = {f"{name}_cpu_ms": round(1e3 * (after[name] - before[name]) / num, 3) for name in after}
    return {
        "transport": one.name,
        "requests_per_s": round(num / elapsed_s, 1),
        "ttft_p50_ms": round(1e3 * statistics.median(tally.ttft_s), 2),
        "num_requests": num,
        "num_errors": len(tally.faults),
        **spent,
    }


async def run(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    seeds = itertools.count(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        async with hearth(SPLIT, Path(folder), step_s=0.0) as (target, processes):
            targets = [Load(name, target, options.concurrency) for name in options.transport]
            for number in range(options.rounds):
                first = number % len(targets)  # what is measured first finds the machine rested
                for each in targets[first:] + targets[:first]:
                    row = await measured(each, processes, next(seeds), options.duration_s)
                    rows.append({"round": number, **row})
                    print(msgspec.json.encode(rows[-1]).decode(), file=sys.stderr)
                    await asyncio.sleep(0)
    return rows


def bars_of(rows: Sequence[Row]) -> list[Bar]:
    num_errors = sum(row["num_errors"] for row in rows)
    bars = [at_most("responses with another number of events", num_errors, 0, "responses")]
    per_s = {(row["round"], row["transport"]): row["requests_per_s"] for row in rows}
    for name, bar in BARS.items():
        ratios = [
            rate / per_s[number, "chat"]
            for (number, transport), rate in per_s.items()
            if transport == name and (number, "chat") in per_s
        ]
        if ratios:
            bars.append(
                at_least(f"{name}: requests/s over chat's", statistics.median(ratios), bar, "x")
            )
    return bars


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--transport", choices=NAMES, nargs="+", default=list(NAMES))
    add("--concurrency", type=int, default=16)
    add("--duration-s", type=float, default=5.0, help="duration of each row")
    add("--rounds", type=int, default=6)
    add("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    rows = uvloop.run(run(options))
    command = ["-m", "benchmarks.serving.transports", *argv]
    is_full = set(options.transport) == set(NAMES)
    write_result("transports", rows, bars_of(rows), command, is_full=is_full)
    return 1 if any(row["num_errors"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
