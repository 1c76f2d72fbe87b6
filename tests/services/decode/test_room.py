"""Room for a request's KV: its tenant's quota, and what a worker says of one that has no room."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from shared.engine.executors.timing_executor import StepCost
from shared.messages import ResendTokens, TokenBatch
from shared.subjects import resend
from tests.services.decode.test_handoff import PROMPT, Cluster, cluster
from tests.support.world.clock import run
from tests.support.world.workers import BLOCK_SIZE, request_of

NUM_BLOCKS = 8  # 128 tokens, where two answers take 240


def test_kv_quota_applies_on_prefill_and_decode_workers():
    async def main():
        async with cluster() as it:
            prefill, decode = it.prefills[0].engine.pool, it.decode.engine.pool
            await it.run(request_of(PROMPT, tenant_id="free"))
            for first in (100, 400, 700):
                prompt = list(range(first, first + 100))
                request = request_of(
                    prompt, tenant_id="bound", kv_quota_tokens=4 * BLOCK_SIZE, max_tokens=2
                )
                received = await it.run(request)
                assert received.finish.served.prefill_worker_id == "prefill-1"
                assert received.finish.reason == "length"
            await it.settled()
            for pool in (prefill, decode):
                assert pool.num_blocks_of("bound") == 4
                assert pool.num_blocks_of("free") >= 15

    run(main())


def test_choices_of_a_request_share_one_kv_quota():
    async def main():
        async with cluster() as it:
            request = request_of(
                PROMPT,
                outputs={0: [], 1: [], 2: []},
                kv_quota_tokens=3 * BLOCK_SIZE,
                max_tokens=40,
                temperature=1.0,
            )
            placement_id = await it.peer.place("decode-1", request, ())
            for index in range(3):
                await it.peer.finished(placement_id, index)
            await it.settled()
            assert it.decode.engine.pool.num_blocks_of("tenant-a") == 3

    run(main())


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
