"""Receipts: what they cost the control plane, and whether their answers are computed again.

    python -m benchmarks.receipts                        10,000 receipts, some ten minutes
    python -m benchmarks.receipts --part cost --rounds 4 --duration-s 3
    python -m benchmarks.receipts --part replays --count 500

`cost`: two clusters of `benchmarks.control_plane`, with and without receipts, by turns.
`replays`: a cluster of `hearth up` with the demo model, one prefill and one decode worker. Each
request (all dialects, sampled at temperature 1.2, with and without seeds, several choices and
prompts) is sent, its receipt read, and the request sent again with the receipt's seed and salt. Of
each receipt a region, the weights, a time, a token and the salt are changed, one at a time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import uvloop

from benchmarks.receipts.cost import cost
from benchmarks.receipts.replays import replays
from benchmarks.report import Bar, Row, write_result


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.receipts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--part", choices=("cost", "replays"), nargs="+", default=["cost", "replays"])
    add("--count", type=int, default=10_000, help="receipts that are replayed")
    add("--at-once", type=int, default=64)
    add("--shape", choices=("split", "one"), default="split")
    add("--concurrency", type=int, default=64)
    add("--duration-s", type=float, default=5.0)
    add("--rounds", type=int, default=6)
    add("--name", default="receipts", help="results/NAME.json")
    options = parser.parse_args(argv)
    rows, bars = list[Row](), list[Bar]()
    for part in options.part:
        found = uvloop.run(cost(options) if part == "cost" else replays(options))
        rows += found[0]
        bars += found[1]
    is_full = options.name != "receipts" or len(set(options.part)) == 2
    write_result(options.name, rows, bars, ["-m", "benchmarks.receipts", *argv], is_full=is_full)
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
