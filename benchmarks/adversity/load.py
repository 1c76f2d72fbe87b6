"""Requests with known prompts, sent at a steady rate, and what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from services.cli.cluster.service_options import DEMO_MODEL_NAME
from tests.support.cluster.clients import Exchange, send

PATH = "/v1/completions"
FIRST_TOKEN_ID, NUM_TOKENS = 300, 1700  # plain text in the demo model's vocabulary
SHOWN_FAILURES = 3


def completion(
    number: int, *, num_prompt_tokens: int, max_tokens: int, **options: Any
) -> dict[str, Any]:
    """Returns a body whose prompt begins with `number`: numbers below 1,700 share no block."""
    prompt = [FIRST_TOKEN_ID + (number + 7 * i) % NUM_TOKENS for i in range(num_prompt_tokens)]
    return {
        "model": DEMO_MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }


async def send_every(
    every_s: float, url: str, api_key: str, bodies: Sequence[dict[str, Any]]
) -> list[Exchange]:
    """Starts one request each `every_s`. Returns when all have ended."""
    tasks = []
    for body in bodies:
        tasks.append(asyncio.create_task(send(url, api_key, PATH, body)))
        await asyncio.sleep(every_s)
    return await asyncio.gather(*tasks)


def is_full(exchange: Exchange) -> bool:
    """Whether the request was answered without an error, with all tokens that it asked for."""
    return exchange.is_successful and exchange.usage[1] == exchange.body["max_tokens"]


def num_moves(exchange: Exchange) -> int:
    """Returns how often the gateway submitted the request again."""
    return int(exchange.metadata.get("num_resubmissions", 0))


def print_failures(row: str, exchanges: Sequence[Exchange]) -> None:
    failed = [each for each in exchanges if not is_full(each)]
    for each in failed[:SHOWN_FAILURES]:
        print(f"{row}: {each}")
