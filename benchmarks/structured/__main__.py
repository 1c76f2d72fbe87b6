"""Constrained output of whole clusters: are answers valid, and what do constraints cost?

Run: python -m benchmarks.structured [--parts answers streams hostile ttft tools]

| part | module | what it measures |
| --- | --- | --- |
| answers | `answers.py` | 1,000 schemas, by models that want something else |
| streams | `streams.py` | ITL of 16 constrained streams beside 16 free ones |
| hostile | `hostile.py` | free streams beside constraints that are made to hurt |
| ttft | `ttft.py` | what a schema adds to the time to the first token |
| tools | `tool_questions.py` | held-out questions that a tool answers |
| suite | `schema_suite.py` | JSONSchemaBench, given a clone of it |

Each part is a result of its own, `results/structured_PART.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.report import Bar, Row, write_result
from benchmarks.structured import answers, hostile, schema_suite, streams, tool_questions, ttft
from tests.support.corpora.json_schemas import NUM_SCHEMAS

Measured = tuple[list[Row], list[Bar]]


def parts(given: argparse.Namespace) -> dict[str, Callable[[], Awaitable[Measured]]]:
    found: dict[str, Callable[[], Awaitable[Measured]]] = {
        "answers": lambda: answers.measure(given.schemas),
        "streams": lambda: streams.measure(given.rounds),
        "hostile": lambda: hostile.measure(),
        "ttft": lambda: ttft.measure(given.rounds),
        "tools": lambda: tool_questions.measure(),
    }
    if given.json_schema_bench is not None:
        found["suite"] = lambda: schema_suite.measure(given.json_schema_bench)
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--parts", nargs="+", metavar="PART", help="(default: all)")
    add("--schemas", type=int, default=NUM_SCHEMAS, help="of the part answers")
    add("--rounds", type=int, default=10, help="of the parts streams and ttft")
    add("--json-schema-bench", type=Path, metavar="DIR", help="a clone: adds the part suite")
    given = parser.parse_args(argv)
    known, is_missed = parts(given), False
    for part in given.parts or known:
        if part not in known:
            parser.error(f"--parts {part}: not one of {', '.join(known)}")
        rows, bars = asyncio.run(known[part]())
        command = ["-m", "benchmarks.structured", *argv]
        write_result(f"structured_{part}", rows, bars, command)
        is_missed = is_missed or not all(each.holds for each in bars)
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
