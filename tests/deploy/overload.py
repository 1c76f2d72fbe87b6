"""More requests of one tenant than the workers have room for."""

from __future__ import annotations

import asyncio
import random

from services.cli.cluster.service_options import DEMO_MODEL_NAME
from tests.chaos.running import BLOCK_BYTES
from tests.chaos.world.workload import Body
from tests.support.cluster.chaos_cluster import ChaosCluster
from tests.support.cluster.clients import Exchange, run_exchange

NUM_CLIENTS = 320
RETRY_S = 5.0
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 20, 120
STEP_S = 0.6  # of workers that are too slow
WORKERS = {"kv-cache-bytes": str(256 * BLOCK_BYTES), "max-batch-tokens": "256"}
SCHEDULERS = {"max-queued-requests": "16"}


async def overload(cluster: ChaosCluster) -> None:
    """Each client sends its next request when the last one has ended; after a rejection, later."""
    async with asyncio.TaskGroup() as clients:
        for number in range(NUM_CLIENTS):
            clients.create_task(_send(cluster, number))


async def _send(cluster: ChaosCluster, number: int) -> None:
    rng, gateways = random.Random(number), [*cluster.urls]
    gateway = gateways[number % len(gateways)]
    while True:
        exchange = Exchange(_body(rng), gateway)
        await run_exchange(exchange, cluster.urls[gateway], cluster.api_key, "/v1/completions")
        if not exchange.is_successful:
            await asyncio.sleep(RETRY_S * (0.5 + rng.random()))


def _body(rng: random.Random) -> Body:
    return {
        "model": DEMO_MODEL_NAME,
        "prompt": [rng.randrange(300, 2000) for _ in range(NUM_PROMPT_TOKENS)],
        "max_tokens": rng.randrange(NUM_OUTPUT_TOKENS // 2, NUM_OUTPUT_TOKENS),
        "ignore_eos": True,
        "stream": True,
    }
