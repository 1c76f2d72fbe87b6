"""Synthetic traces. Each depends only on its seed and is ordered by time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from math import exp, log
from random import Random

from benchmarks.simulate.trace import BLOCK_TOKENS, TraceRequest


@dataclass(slots=True)
class Blocks:
    """Creates block ids, each new one once."""

    _ids: Iterator[int] = field(default_factory=lambda: count(1))

    def new(self, num_tokens: int) -> list[int]:
        return [next(self._ids) for _ in range(-(-num_tokens // BLOCK_TOKENS))]


def log_uniform(draw: Random, low: float, high: float) -> int:
    return round(exp(draw.uniform(log(low), log(high))))


def spread(num_requests: int, per_s: float, *, seed: int = 1) -> Iterator[TraceRequest]:
    """Yields prompts of 256 to 25,600 tokens, log-uniform; none share a prefix."""
    draw, blocks, at_s = Random(seed), Blocks(), 0.0
    for _ in range(num_requests):
        at_s += draw.expovariate(per_s)
        num_tokens = log_uniform(draw, 256, 25_600)
        yield TraceRequest(at_s * 1e3, num_tokens, draw.randint(16, 256), blocks.new(num_tokens))


def hot_prefix(num_requests: int, per_s: float, *, seed: int = 2) -> Iterator[TraceRequest]:
    """Yields requests. Four of five requests begin with one of 4 prompts of 8,192 tokens, the first
    by far the hottest; the others with one of 400 different ones.
    """
    draw, blocks, at_s = Random(seed), Blocks(), 0.0
    hot = [blocks.new(8192) for _ in range(4)]
    others = [blocks.new(8192) for _ in range(400)]
    for _ in range(num_requests):
        at_s += draw.expovariate(per_s)
        is_hot = draw.random() < 0.8
        shared = hot[min(3, int(draw.expovariate(1.2)))] if is_hot else draw.choice(others)
        own = log_uniform(draw, 64, 2048)
        num_tokens = 8192 + own
        yield TraceRequest(at_s * 1e3, num_tokens, draw.randint(32, 256), shared + blocks.new(own))


def agents(
    num_sessions: int, sessions_per_s: float, *, turns: int = 12, seed: int = 3
) -> Iterator[TraceRequest]:
    """Sessions of about `turns` calls: each call is the full history, the tools' results for the
    last one, and a new end; the history begins with the system prompt of one of 8 agents.
    """
    draw, blocks = Random(seed), Blocks()
    prompts = [blocks.new(2048) for _ in range(8)]
    starts, at_s = [], 0.0
    for number in range(num_sessions):
        at_s += draw.expovariate(sessions_per_s)
        starts.append((at_s, number, _Session(f"s{number}", list(draw.choice(prompts)), 2048)))
    waiting = starts
    heapq.heapify(waiting)
    while waiting:
        at_s, number, session = heapq.heappop(waiting)
        yield session.call(at_s, draw, blocks)
        if draw.random() < 1 - 1 / turns:
            heapq.heappush(waiting, (at_s + 2.0 + draw.expovariate(1 / 8.0), number, session))


@dataclass(slots=True)
class _Session:
    name: str
    hash_ids: list[int]
    num_tokens: int  # tokens of the history's full blocks

    def call(self, at_s: float, draw: Random, blocks: Blocks) -> TraceRequest:
        """Returns the next call; everything after the last full block is new in each call."""
        num_new, num_answered = log_uniform(draw, 200, 3000), draw.randint(40, 400)
        num_tokens = self.num_tokens + num_new
        num_whole = (num_tokens + num_answered) // BLOCK_TOKENS
        final = self.hash_ids + blocks.new(num_tokens + num_answered - self.num_tokens)
        prompt = final[: num_tokens // BLOCK_TOKENS]
        if num_tokens % BLOCK_TOKENS:
            prompt = prompt + blocks.new(1)
        self.hash_ids, self.num_tokens = final[:num_whole], num_whole * BLOCK_TOKENS
        return TraceRequest(
            at_s * 1e3,
            num_tokens,
            num_answered,
            prompt,
            session=self.name,
            final_hash_ids=self.hash_ids,
        )


def conversations(num_requests: int, per_s: float, *, seed: int = 5) -> Iterator[TraceRequest]:
    """Lengths and sharing about as in the Mooncake trace of conversations: prompts of 12,000
    tokens on average, outputs of 350, four of ten blocks seen before: sessions of few turns.
    """
    draw, blocks, at_s = Random(seed), Blocks(), 0.0
    waiting: list[tuple[float, int, _Session]] = []
    names = count()
    for _ in range(num_requests):
        at_s += draw.expovariate(per_s)
        if waiting and waiting[0][0] <= at_s:
            _, number, session = heapq.heappop(waiting)
        else:
            number = next(names)
            num_blocks = log_uniform(draw, 1, 60)
            session = _Session(
                f"s{number}", blocks.new(num_blocks * BLOCK_TOKENS), num_blocks * BLOCK_TOKENS
            )
        yield session.call(at_s, draw, blocks)
        if session.num_tokens < 60_000 and draw.random() < 0.6:
            heapq.heappush(waiting, (at_s + 5.0 + draw.expovariate(1 / 30.0), number, session))


def flood(
    num_normal: int, normal_per_s: float, flood_per_s: float, *, flooder: str, seed: int = 4
) -> Iterator[TraceRequest]:
    """Yields normal requests of 20 tenants, of 256 to 4,096 tokens; and a flooder's of 2,048,
    during the same time. Without a flood the normal ones are identical.
    """
    draw, others = Random(seed), Random(seed + 1)
    blocks, at_s, flood_at_s = Blocks(), 0.0, 0.0
    for _ in range(num_normal):
        at_s += draw.expovariate(normal_per_s)
        while flood_per_s > 0 and flood_at_s < at_s:
            yield TraceRequest(flood_at_s * 1e3, 2048, 64, blocks.new(2048), tenant=flooder)
            flood_at_s += others.expovariate(flood_per_s)
        num_tokens = log_uniform(draw, 256, 4096)
        yield TraceRequest(
            at_s * 1e3,
            num_tokens,
            draw.randint(16, 128),
            blocks.new(num_tokens),
            tenant=f"tenant-{draw.randrange(20)}",
        )
