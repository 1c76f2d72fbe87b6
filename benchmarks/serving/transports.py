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

import msgspec
import uvloop

from benchmarks.control_plane import SHAPES, cpu_s, prompts
from benchmarks.report import Bar, Row, at_least, at_most, write_result
from benchmarks.serving import closed_loop, nats_loop
from benchmarks.serving.closed_loop import ClientKind, Tally, Target
from benchmarks.serving.hearth import SPLIT, TENANT, Processes, hearth

SHAPE = SHAPES["split"]
NAMES = ("chat", "workers_ai", "messages", "responses", "stored", "nats")
# requests/s over chat's
BARS = {"workers_ai": 0.9, "messages": 0.9, "responses": 0.8, "stored": 0.8, "nats": 1.2}
WARM_UP_S = 1.0


class Load:
    """One dialect and transport of a running cluster."""

    def __init__(self, name: str, target: Target, concurrency: int) -> None:
        if name == "workers_ai":
            path = f"/client/v4/accounts/{TENANT}/ai/run/{target.model}"
            target = replace(target, path=path)
        elif name == "messages":
            target = replace(target, path="/v1/messages")
        elif name in ("responses", "stored"):
            target = replace(target, path=closed_loop.RESPONSES, is_stored=name == "stored")
        self.name = name
        self._target = target
        self._nats = nats_loop.NatsTarget(target.nats_url, target.model)
        self._concurrency = concurrency
        self._num_events = 0

    async def count_events(self, prompt: str) -> None:
        """Events of one response, before all others."""
        num_tokens = SHAPE.num_output_tokens
        if self.name == "nats":
            self._num_events = await nats_loop.num_events_of(self._nats, prompt, num_tokens)
        else:
            self._num_events = await closed_loop.num_events_of(self._target, prompt, num_tokens)

    async def run(self, source: Iterator[str], duration_s: float) -> Tally:
        if self.name == "nats":
            return await nats_loop.load(
                self._nats,
                source,
                concurrency=self._concurrency,
                duration_s=duration_s,
                num_output_tokens=SHAPE.num_output_tokens,
                num_events=self._num_events,
            )
        return await closed_loop.load(
            self._target,
            source,
            concurrency=self._concurrency,
            duration_s=duration_s,
            num_output_tokens=SHAPE.num_output_tokens,
            num_events=self._num_events,
            kind=ClientKind(),
        )


async def measured(load: Load, processes: Processes, seed: int, duration_s: float) -> Row:
    source = prompts(SHAPE.num_input_tokens, seed)
    await load.count_events(next(source))
    await load.run(source, WARM_UP_S)
    before, started = cpu_s(processes), time.perf_counter()
    tally = await load.run(source, duration_s)
    elapsed_s, after = time.perf_counter() - started, cpu_s(processes)
    for fault in tally.faults[:3]:
        print(fault, file=sys.stderr)
    num = tally.num_requests
    spent = {f"{name}_cpu_ms": round(1e3 * (after[name] - before[name]) / num, 3) for name in after}
    return {
        "transport": load.name,
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
            loads = [Load(name, target, options.concurrency) for name in options.transport]
            for number in range(options.rounds):
                first = number % len(loads)  # what is measured first finds the machine rested
                for load in loads[first:] + loads[:first]:
                    row = await measured(load, processes, next(seeds), options.duration_s)
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
    write_result("transports", rows, bars_of(rows), ["-m", "benchmarks.serving.transports", *argv])
    return 1 if any(row["num_errors"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
