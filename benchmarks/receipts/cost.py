"""Requests per second with and without receipts, on clusters whose workers' steps take no time."""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import msgspec

from benchmarks.control_plane import MANNERS, SERVICES, SHAPES, Measurement, Servers, middle
from benchmarks.report import Bar, Row, at_least, at_most
from benchmarks.serving.cluster import hearth

LEAST = 0.97  # of the requests per second without receipts
SECRET = {"HEARTH_CLUSTER_SECRET": "secret of a benchmark"}
MODES: dict[str, dict[str, str]] = {
    "receipts": SECRET,
    "none": {**SECRET, "HEARTH_RECEIPT_TTL_S": "0"},
}


@contextmanager
def environ(changes: Mapping[str, str]) -> Iterator[None]:
    """Changes the environment of the processes that start inside the block."""
    os.environ |= changes
    try:
        yield
    finally:
        for name in changes:
            del os.environ[name]


async def cost(options: argparse.Namespace) -> tuple[list[Row], list[Bar]]:
    """Returns the median row of each mode. Rounds begin with another mode each."""
    seeds, taken = itertools.count(1), dict[str, list[Row]]()
    async with AsyncExitStack() as stack:
        servers: Servers = {}
        for mode, changes in MODES.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            with environ(changes):
                cluster = hearth(SERVICES[options.shape], folder, step_s=0.0)
                servers[mode] = await stack.enter_async_context(cluster)
        for number in range(options.rounds):
            for mode in sorted(MODES, reverse=bool(number % 2)):
                target, processes = servers[mode]
                shape = SHAPES[options.shape]
                measured = Measurement(target, processes, shape, options.duration_s, next(seeds))
                row: Row = {"receipts": mode, "shape": options.shape}
                row |= {"concurrency": options.concurrency}
                row |= await measured.row(options.concurrency, MANNERS["quickack"])
                print(msgspec.json.encode(row).decode(), file=sys.stderr)
                taken.setdefault(mode, []).append(row)
    return [middle(each) for each in taken.values()], _bars_of(taken)


def _bars_of(taken: Mapping[str, list[Row]]) -> list[Bar]:
    """The speed of the machine changes: a ratio is the median of the rounds' ratios."""
    pairs = list(zip(taken["receipts"], taken["none"], strict=True))
    speed = statistics.median(
        one["requests_per_s"] / other["requests_per_s"] for one, other in pairs
    )
    cpu_us = statistics.median(
        1e3 * (one["gateway_cpu_ms"] - other["gateway_cpu_ms"]) for one, other in pairs
    )
    num_errors = sum(row["num_errors"] for rows in taken.values() for row in rows)
    return [
        at_least("requests/s with receipts over without", speed, LEAST, "x"),
        at_most("CPU time of the gateway for a receipt", cpu_us, 150.0, "µs"),
        at_most("failed requests", num_errors, 0, "requests"),
    ]
