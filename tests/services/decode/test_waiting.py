"""What a worker says of a request for which it has no room."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from shared.engine.executors.timing_executor import StepCost
from shared.messages import ResendTokens, TokenBatch
from shared.subjects import resend
from tests.services.decode.test_handoff import Cluster, cluster
from tests.support.world.clock import run
from tests.support.world.workers import request_of

NUM_BLOCKS = 8  # 128 tokens, where two answers take 240


def scenario(test: Callable[[Cluster], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with cluster(num_blocks=NUM_BLOCKS, cost=StepCost(base_s=0.1), **options) as it:
            await test(it)

    run(main())


async def is_waiting(it: Cluster, placement_id: bytes) -> bool:
    command = ResendTokens(placement_id=placement_id, choice_index=0, from_position=0)
    reply = await it.peer.bus.request(resend("decode-1"), command, TokenBatch, timeout_s=0.2)
    return reply.entries[0].is_waiting


def test_request_that_is_preempted_waits_until_the_older_one_has_ended() -> None:
    async def test(it: Cluster) -> None:
        requests = [request_of(list(range(n, n + 20)), max_tokens=100) for n in (100, 200)]
        first, second = [await it.peer.place("decode-1", each) for each in requests]
        async with asyncio.timeout(30):
            while not await is_waiting(it, second):
                await asyncio.sleep(0.1)
        assert not await is_waiting(it, first)
        await it.peer.finished(first)
        assert not await is_waiting(it, second)
        assert len((await it.peer.finished(second)).output) == 100

    scenario(test)
