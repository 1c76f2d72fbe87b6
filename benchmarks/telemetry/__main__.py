"""The cost of traces for the control plane: clusters without them, with 1 % and with all requests
traced.

    python -m benchmarks.telemetry
    python -m benchmarks.telemetry --duration-s 5 --rounds 1 --concurrency 16

The clusters and clients are those of `benchmarks.control_plane`, whose workers' steps take no time.
They are measured by turns, as two of them never run at once. Spans go over OTLP/HTTP to a collector
that drops them; it shares the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import uvloop

from benchmarks.control_plane import MANNERS, SERVICES, SHAPES, Measurement, Servers, middle
from benchmarks.report import Bar, Row, at_least, at_most, write_result
from benchmarks.serving.cluster import hearth

# the sampled share of requests; None: the SDK is not even imported
MODES: dict[str, float | None] = {"off": None, "1 %": 0.01, "100 %": 1.0}
BARS = {"1 %": 0.99, "100 %": 0.95}


@contextmanager
def tracing(endpoint: str, share: float | None) -> Iterator[None]:
    """Traces the processes that start inside the block, a `share` of their requests."""
    if share is None:
        yield
        return
    os.environ |= {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(share),
    }
    try:
        yield
    finally:
        for name in [each for each in os.environ if each.startswith("OTEL_")]:
            del os.environ[name]


@asynccontextmanager
async def collector() -> AsyncIterator[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.telemetry.collector", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def clusters(shape: str, endpoint: str) -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:
        servers: Servers = {}
        for mode, share in MODES.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            with tracing(endpoint, share):
                cluster = hearth(SERVICES[shape], folder, step_s=0.0)
                servers[mode] = await stack.enter_async_context(cluster)
        yield servers


async def run(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Returns the rows of each mode, one a round. The rounds begin with another mode each."""
    seeds = itertools.count(1)
    taken: dict[str, list[Row]] = {mode: [] for mode in MODES}
    async with collector() as endpoint, clusters(options.shape, endpoint) as servers:
        for mode in in_turns([*MODES], options.rounds):
            target, processes = servers[mode]
            measurement = Measurement(
                target, processes, SHAPES[options.shape], options.duration_s, next(seeds)
            )
            row: Row = {"traces": mode, "shape": options.shape, "concurrency": options.concurrency}
            row |= await measurement.row(options.concurrency, MANNERS["quickack"])
            print(msgspec.json.encode(row).decode(), file=sys.stderr)
            taken[mode].append(row)
    return taken


def in_turns(modes: Sequence[str], num_rounds: int) -> Iterator[str]:
    for number in range(num_rounds):
        first = number % len(modes)
        yield from (*modes[first:], *modes[:first])


def bars_of(taken: Mapping[str, Sequence[Row]]) -> list[Bar]:
    """Returns the bars. A ratio is the median over the rounds, since the speed of the
    machine changes.
    """
    bars = [
        at_least(
            f"requests/s, {mode} traced over off", ratio(taken[mode], taken["off"]), least, "x"
        )
        for mode, least in BARS.items()
    ]
    num_errors = sum(row["num_errors"] for rows in taken.values() for row in rows)
    return [*bars, at_most("failed requests", num_errors, 0, "requests")]


def ratio(rows: Sequence[Row], others: Sequence[Row]) -> float:
    pairs = zip(rows, others, strict=True)
    return statistics.median(
        one["requests_per_s"] / other["requests_per_s"] for one, other in pairs
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.telemetry",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=tuple(SHAPES), default="split")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--duration-s", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args(argv)
    taken = uvloop.run(run(options))
    bars = bars_of(taken)
    rows = [middle(each) for each in taken.values()]
    write_result("telemetry", rows, bars, ["-m", "benchmarks.telemetry", *argv])
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
