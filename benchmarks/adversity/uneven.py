"""U1: long answers on a fleet of which one worker's KV cache is smaller than an answer."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.adversity.cluster import cluster
from benchmarks.adversity.load import completion, is_full, print_failures, send_every
from benchmarks.report import Bar, at_least
from shared.engine.runners.timing_runner import STATE_BYTES

NUM_REQUESTS, EVERY_S = 12, 0.05
NUM_PROMPT_TOKENS, MAX_TOKENS = 40, 200
KV_TOKENS = {"decode-1": 128, "decode-2": 4096}


async def measure(rows: Sequence[str]) -> list[Bar]:
    async with cluster(dict.fromkeys(KV_TOKENS, "decode")) as fleet:
        gateway = fleet.start_services()
        workers = [
            fleet.start("decode", name, options={"kv-cache-bytes": STATE_BYTES * num_tokens})
            for name, num_tokens in KV_TOKENS.items()
        ]
        await fleet.ready(gateway, *workers)
        bodies = [
            completion(n, num_prompt_tokens=NUM_PROMPT_TOKENS, max_tokens=MAX_TOKENS)
            for n in range(NUM_REQUESTS)
        ]
        exchanges = await send_every(EVERY_S, gateway.url, fleet.api_key, bodies)
    print_failures("U1", exchanges)
    num_full = sum(map(is_full, exchanges))
    return [at_least("U1 answers with 200 tokens, of 12", num_full, NUM_REQUESTS, "requests")]
