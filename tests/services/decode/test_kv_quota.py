"""A request's KV quota applies on every worker that computes or receives its KV."""

from __future__ import annotations

from tests.services.decode.test_handoff import PROMPT, cluster
from tests.support.world.clock import run
from tests.support.world.workers import BLOCK_SIZE, request_of


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
