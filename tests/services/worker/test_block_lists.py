"""Several replicas of an index that list the blocks of one worker at once."""

from __future__ import annotations

import asyncio

import pytest

from shared.engine.batching import block_lists
from shared.errors import WorkerBusy
from shared.messages import BlockPage, ListBlocks
from shared.packing import unpack_hashes
from shared.subjects import list_blocks
from tests.services.decode.test_handoff import PROMPT
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import run
from tests.support.world.kv_link import DataPlane
from tests.support.world.workers import Peer, SimulatedWorker, request_of


def test_a_list_is_not_continued_in_that_of_another_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_lists, "BLOCKS_PER_PAGE", 2)

    async def main() -> None:
        network, plane = SimulatedNetwork(), DataPlane()
        worker, peer = SimulatedWorker(network, plane, "decode-1", ("decode",)), Peer(network)
        for each in (worker, peer):
            await each.start()
        await asyncio.sleep(2)  # virtual: heartbeats have arrived
        for tenant_id in ("a", "b"):
            request = request_of(PROMPT, tenant_id=tenant_id)
            await peer.finished(await peer.place("decode-1", request))

        async def page(cursor: int | None) -> BlockPage:
            assert cursor is not None
            question = ListBlocks(cursor=cursor)
            subject = list_blocks("decode", "decode-1")
            return await peer.bus.request(subject, question, BlockPage, timeout_s=1.0)

        pool = worker.engine.pool
        expected = {each.block_hash for each in pool.cached_blocks()}
        pages = [await page(0)]
        pool.drop_tenant("a")  # those of b move to the front
        await page(0)
        while pages[-1].next_cursor is not None:
            pages.append(await page(pages[-1].next_cursor))
        found = [run.block_hashes for each in pages for run in each.stored]
        assert {each for hashes in found for each in unpack_hashes(hashes)} == expected
        assert len({each.sequence_number for each in pages}) == 1
        assert len(worker.worker._block_lists) == 1, "that of the other index"
        with pytest.raises(WorkerBusy):
            await page(pages[-2].next_cursor)
        for _ in range(2 * block_lists.MAX_LISTS):
            await page(0)
        assert len(worker.worker._block_lists) == block_lists.MAX_LISTS
        for process in (worker, peer):
            await process.stop()

    run(main())
