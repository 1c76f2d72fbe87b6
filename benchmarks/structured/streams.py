"""ITL of 16 streams under a grammar beside 16 free ones of equal length, by turns.

Both prompts, lengths and temperatures are equal; the grammar is that of a list of objects which
cannot end before `max_tokens`. In `mixed`, the free half of 32 streams is measured while the other
half is constrained, or free. The ratio of a model is the median over rounds.
"""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.checkpoints import LLAMA_125M, write_random_llama, write_tokenizer
from benchmarks.report import Bar, Row, at_most
from benchmarks.structured.cluster import Body, Served, gaps_s, served
from services.cli.cluster.service_options import DEMO_MODEL_DIR

NUM_STREAMS, NUM_TOKENS = 16, 128
MAX_RATIO, MAX_MIXED_RATIO = 1.10, 1.05
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["worker", "gateway", "scheduler"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
    },
    "required": ["name", "kind", "count"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 200}


async def measure(num_rounds: int) -> tuple[list[Row], list[Bar]]:
    rows, bars = [], []
    with TemporaryDirectory(prefix="hearth-model-") as folder:
        large = Path(folder) / "125m"
        large.mkdir()
        write_random_llama(large, LLAMA_125M, dtype="bfloat16")
        write_tokenizer(large, LLAMA_125M["vocab_size"])
        for name, model_dir in (("demo", DEMO_MODEL_DIR), ("125 M, random", large)):
            row = await _measure(name, model_dir, num_rounds)
            rows.append(row)
            bars.append(
                at_most(f"{name}: ITL p50, constrained to free", row["ratio"], MAX_RATIO, "x")
            )
            mixed = f"{name}: ITL p50 of free streams beside constrained to beside free"
            bars.append(at_most(mixed, row["mixed ratio"], MAX_MIXED_RATIO, "x"))
    return rows, bars


async def _measure(name: str, model_dir: Path, num_rounds: int) -> Row:
    async with served(model_dir, num_prefill=0, num_decode=0, num_both=1) as target:
        kinds: dict[str, Any] = {"free": _free(target), "constrained": _constrained(target)}
        found: dict[str, list[float]] = {each: [] for each in (*kinds, "mixed", "mixed free")}
        before = sum(each.num_late_masks for each in (await target.worker_loads()).values())
        for number in range(num_rounds + 1):
            order = [*kinds] if number % 2 else [*reversed(kinds)]
            for kind in order:
                found[kind].append(await _itl_p50_ms(target, [kinds[kind]] * NUM_STREAMS))
            for kind in order:
                other = [kinds[kind]] * NUM_STREAMS
                key = "mixed" if kind == "constrained" else "mixed free"
                found[key].append(await _itl_p50_ms(target, [kinds["free"]] * NUM_STREAMS, other))
        after = sum(each.num_late_masks for each in (await target.worker_loads()).values())
    rounds = {kind: each[1:] for kind, each in found.items()}  # the first warms up
    num_masks = (num_rounds + 1) * 2 * NUM_STREAMS * NUM_TOKENS
    return {
        "case": name,
        **{f"{kind} ITL p50 ms": statistics.median(each) for kind, each in rounds.items()},
        "ratio": _ratio(rounds["constrained"], rounds["free"]),
        "mixed ratio": _ratio(rounds["mixed"], rounds["mixed free"]),
        "late masks": (after - before) / num_masks,
    }


def _ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


async def _itl_p50_ms(
    target: Served, bodies: list[Body], others: list[Body] | None = None
) -> float:
    """Returns the median inter-token latency of `bodies` in ms, while `others` run as well."""
    seeded = [{**body, "seed": n} for n, body in enumerate([*bodies, *(others or [])])]
    exchanges = await asyncio.gather(*map(target.stream, seeded))
    return statistics.median(gaps_s(exchanges[: len(bodies)])) * 1e3


def _free(target: Served) -> Body:
    return target.chat(max_tokens=NUM_TOKENS, temperature=1.0, ignore_eos=True)


def _constrained(target: Served) -> Body:
    return target.chat(max_tokens=NUM_TOKENS, temperature=1.0, guided_json=SCHEMA)
