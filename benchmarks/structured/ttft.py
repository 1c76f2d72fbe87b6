"""The time that a schema of 2 KB adds to the first token: when first seen, and when seen before.

Requests run one at a time, by turns: free, with a schema that no process has seen, with one that
all have. Times are medians of all rounds; the first token of a free answer and of `{` take the same
step.
"""

from __future__ import annotations

import statistics
from typing import Any

import msgspec

from benchmarks.report import Bar, Row, at_most
from benchmarks.structured.cluster import Served, served
from services.cli.cluster.service_options import DEMO_MODEL_DIR
from services.client.load_test import percentile

REQUESTS_A_ROUND = 6
MAX_TOKENS = 4
MAX_FIRST_SEEN_MS, MAX_CACHED_MS = 5.0, 1.0
NUM_WARM_UPS = 24  # warm-ups of each kind: each process of the gateway imports its modules


def schema(number: int) -> dict[str, Any]:
    """Returns a schema of about 2 KB; another grammar for each number."""
    properties: dict[str, Any] = {
        f"field_{index}_{number}": {
            "type": ("string", "integer", "boolean")[index % 3],
            "description": "What the field means, and in which unit it is given.",
        }
        for index in range(16)
    }
    properties["status"] = {"enum": ["open", "closed", "pending", f"other {number}"]}
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


async def measure(num_rounds: int) -> tuple[list[Row], list[Bar]]:
    found: dict[str, list[float]] = {"free": [], "first seen": [], "cached": []}
    numbers = iter(range(1, 100_000))
    async with served(DEMO_MODEL_DIR) as target:
        for _ in range(NUM_WARM_UPS):
            await _ttft_ms(target, schema(next(numbers)))
            await _ttft_ms(target, schema(0))
            await _ttft_ms(target, None)
        for _ in range(num_rounds * REQUESTS_A_ROUND):
            found["free"].append(await _ttft_ms(target, None))
            found["first seen"].append(await _ttft_ms(target, schema(next(numbers))))
            found["cached"].append(await _ttft_ms(target, schema(0)))
    medians = {kind: statistics.median(each) for kind, each in found.items()}
    rows = [
        {
            "case": kind,
            "requests": len(each),
            "schema bytes": 0 if kind == "free" else len(msgspec.json.encode(schema(0))),
            "TTFT p50 ms": medians[kind],
            "TTFT p90 ms": percentile(each, 90),
        }
        for kind, each in found.items()
    ]
    added = {kind: medians[kind] - medians["free"] for kind in ("first seen", "cached")}
    return rows, [
        at_most("TTFT p50 added, first seen", added["first seen"], MAX_FIRST_SEEN_MS, "ms"),
        at_most("TTFT p50 added, cached", added["cached"], MAX_CACHED_MS, "ms"),
    ]


async def _ttft_ms(target: Served, schema: dict[str, Any] | None) -> float:
    """Returns the milliseconds until the first event with text."""
    fields = {} if schema is None else {"guided_json": schema}
    exchange = await target.stream(target.chat(max_tokens=MAX_TOKENS, **fields))
    return (exchange.text_arrivals[0] - exchange.started) * 1e3
