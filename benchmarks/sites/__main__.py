"""Sites that are linked by leaf nodes: what a link carries, and what it brings.

    python -m benchmarks.sites [--only PART ...] [--scale 1.0]

Each part writes a result of its own, `benchmarks/results/sites_PART.json`; with a scale below 1 it
prints it only. A part in virtual time has the same figures on any machine, except for CPU times.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable

import structlog

from benchmarks.report import Bar, Row, write_result
from benchmarks.sites import live, pair, placement, prefill, traffic

# Shortened by a scale of at most 1; returns rows and bars.
Part = Callable[[float], tuple[list[Row], list[Bar]]]
PARTS: dict[str, Part] = {
    "traffic": traffic.run,
    "placement": placement.run,
    "pair": pair.run,
    "prefill": prefill.run,
    "live": live.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    warnings_only = structlog.make_filtering_bound_logger(logging.WARNING)
    structlog.configure(wrapper_class=warnings_only)
    for name in options.only:
        rows, bars = PARTS[name](options.scale)
        command = ["-m", "benchmarks.sites", "--only", name]
        if options.scale != 1:
            command += ["--scale", f"{options.scale:g}"]
        write_result(f"sites_{name}", rows, bars, command, is_full=options.scale >= 1)


if __name__ == "__main__":
    main()
