"""An open loop of requests over HTTP, and what became of them."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

from benchmarks.report import Row
from benchmarks.serving.closed_loop import Target
from services.client.load_test import percentile
from tests.support.cluster.clients import Exchange, send

TTFT_S, ITL_S = 3.0, 0.06  # as in benchmarks/sites/pair.py
TOKEN_IDS = range(300, 2000)  # the demo model's vocabulary without special tokens
_salts = count()


@dataclass(frozen=True)
class Load:
    """`per_s` requests a second for `duration_s`, Poisson. No two share a prefix."""

    per_s: float
    duration_s: float
    num_input_tokens: int
    num_output_tokens: int
    seed: int = 1

    def times_s(self) -> Iterator[float]:
        random, at_s = Random(self.seed), 0.0
        while (at_s := at_s + random.expovariate(self.per_s)) < self.duration_s:
            yield at_s

    def body(self, number: int, model: str) -> dict[str, object]:
        prompt = Random(f"{self.seed} {number}").choices(TOKEN_IDS, k=self.num_input_tokens)
        return {
            "model": model,
            "prompt": prompt,
            "max_tokens": self.num_output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": str(next(_salts)),
        }


async def send_all(target: Target, load: Load) -> list[Exchange]:
    """Returns the exchanges, in the order of their requests."""
    began_at = time.monotonic()

    async def one(number: int, at_s: float) -> Exchange:
        await asyncio.sleep(began_at + at_s - time.monotonic())
        body = load.body(number, target.model)
        return await send(target.url, target.api_key, "/v1/completions", body)

    return await asyncio.gather(*(one(n, at_s) for n, at_s in enumerate(load.times_s())))


def is_far(exchange: Exchange) -> bool:
    """Whether the other site, or a worker of the other region, generated the tokens."""
    worker = str(exchange.metadata["decode_worker"])
    return "/" in worker or worker.endswith("-there")


def is_rejected(exchange: Exchange) -> bool:
    return exchange.status in (429, 503) and exchange.has_retry_after


def is_good(exchange: Exchange) -> bool:
    """Whether it met the limits of TTFT and of the mean ITL."""
    if not exchange.is_successful or exchange.ttft_s > TTFT_S:
        return False
    spread_s = exchange.arrivals[-1] - exchange.arrivals[0]
    return spread_s <= ITL_S * (int(str(exchange.body["max_tokens"])) - 1)


def completed_per_s(exchanges: Sequence[Exchange], load: Load) -> float:
    """Returns the requests that ended while others came, over that time."""
    began_at = exchanges[0].started
    ended = (each for each in exchanges if each.is_successful)
    return sum(each.ended - began_at <= load.duration_s for each in ended) / load.duration_s


def row_of(name: str, exchanges: Sequence[Exchange], load: Load, *, num_turns: int = 1) -> Row:
    ended = [each for each in exchanges if each.is_successful]
    lasted_s = load.duration_s * num_turns
    ttft_s = sorted(each.ttft_s for each in ended)
    return {
        "run": name,
        "offered/s": load.per_s,
        "requests": len(exchanges),
        "rejected": sum(map(is_rejected, exchanges)),
        "failed": sum(not (e.is_successful or is_rejected(e)) for e in exchanges),
        "far": sum(map(is_far, ended)),
        "goodput/s": round(sum(map(is_good, exchanges)) / lasted_s, 3),
        "TTFT p50 ms": round(1e3 * statistics.median(ttft_s), 1),
        "TTFT p90 ms": round(1e3 * percentile(ttft_s, 90), 1),
    }
