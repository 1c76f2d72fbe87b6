from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import msgspec
import pytest

from services.kv_index.service import build_kv_index
from shared.clock import MonotonicClock
from shared.config import KvIndexConfig
from shared.errors import HearthError, NoResponders
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S, SILENCE_LIMIT_S
from shared.messages import (
    BlockPage,
    BlocksRemoved,
    Heartbeat,
    ListBlocks,
    MatchPrefix,
    PrefixMatches,
)
from shared.store import RedisStore
from shared.subjects import HEARTBEATS, MATCH
from shared.transport.bus import NatsBus
from tests.services.kv_index.rig import CacheWorker, Rig, all_matches, block, eventually
from tests.support.servers import NatsServer, RedisServer
from tests.support.waiting import LIMIT_S
from tests.support.world.clock import run


def scenario(test: Callable[[Rig], Awaitable[None]]) -> None:
    async def play() -> None:
        rig = Rig()
        await rig.service.start()
        await asyncio.sleep(1.5)  # the health monitor has received its own heartbeats
        await test(rig)
        await rig.service.stop()

    run(play())


def test_events_are_applied_at_once() -> None:
    async def test(rig: Rig) -> None:
        first, second = await rig.worker("prefill-0"), await rig.worker("decode-0", "decode")
        await asyncio.sleep(0.1)
        await first.store(1, 2, 3)
        await second.store(1)
        await asyncio.sleep(0.001)
        assert await rig.match(1, 2, 3, 4) == ("exact", {"prefill-0": 3, "decode-0": 1})
        await first.remove(2)
        await asyncio.sleep(0.001)
        assert await rig.match(1, 2, 3) == ("exact", {"prefill-0": 1, "decode-0": 1})

    scenario(test)


def test_new_index_lists_worker_blocks_page_by_page() -> None:
    async def test(rig: Rig) -> None:
        worker = CacheWorker(rig.network.bus("prefill-0"), rig.clock)
        worker.held = dict.fromkeys(range(1, 11))
        worker.sequence_number = 17
        await worker.join()
        await asyncio.sleep(0.1)
        assert await rig.exact(*range(1, 11)) == {"prefill-0": 10}
        assert worker.num_listed == 3

    scenario(test)


def test_lost_event_is_detected_and_resynced() -> None:
    async def test(rig: Rig) -> None:
        worker = await rig.worker("prefill-0")
        await asyncio.sleep(0.1)
        await worker.store(1, 2)
        rig.network.is_dropped = lambda subject, sender, receiver: subject.endswith("kv_events")
        await worker.remove(2)
        rig.network.is_dropped = lambda subject, sender, receiver: subject.endswith("list_blocks")
        await worker.store(3)
        await asyncio.sleep(0.001)
        state, lengths = await rig.match(1, 2, 3)
        assert state == "degraded"
        assert lengths == {"prefill-0": 2}
        rig.network.is_dropped = lambda subject, sender, receiver: False
        assert await rig.exact(1, 2, 3, within_s=2.0) == {"prefill-0": 1}

    scenario(test)


def test_lost_last_event_is_detected_by_heartbeats() -> None:
    async def test(rig: Rig) -> None:
        worker = await rig.worker("prefill-0")
        await asyncio.sleep(0.1)
        await worker.store(1, 2)
        rig.network.is_dropped = lambda subject, sender, receiver: subject.endswith("kv_events")
        await worker.remove(2)
        rig.network.is_dropped = lambda subject, sender, receiver: False
        await asyncio.sleep(3 * HEARTBEAT_INTERVAL_S)
        assert await rig.match(1, 2) == ("exact", {"prefill-0": 1})
        num_listed = worker.num_listed
        await asyncio.sleep(4 * HEARTBEAT_INTERVAL_S)
        assert worker.num_listed == num_listed

    scenario(test)


def test_resync_retains_valid_holders_in_redis() -> None:
    """Also for a prefix that is no longer the tip of a run in the worker's pages."""

    async def test(rig: Rig) -> None:
        worker = await rig.worker("prefill-0")
        await asyncio.sleep(0.1)
        await worker.store(1, 2)
        await worker.store(3, 4)
        await worker.store(9)
        rig.network.is_dropped = lambda subject, sender, receiver: subject.endswith("kv_events")
        await worker.remove(9)
        rig.network.is_dropped = lambda subject, sender, receiver: False
        await asyncio.sleep(5 * HEARTBEAT_INTERVAL_S)
        is_held = {
            number: b"holder:prefill-0" in rig.store.data[f"hearth:t:prefix:{block(number).hex()}"]
            for number in (2, 4, 9)
        }
        assert is_held == {2: True, 4: True, 9: False}

    scenario(test)


def test_events_during_a_resync_are_replayed() -> None:
    async def test(rig: Rig) -> None:
        worker = CacheWorker(rig.network.bus("prefill-0"), rig.clock)
        worker.held = dict.fromkeys(range(1, 41))
        rig.network.latency_s = 0.01
        await worker.join()
        await eventually(lambda: worker.num_listed == 3)
        await worker.remove(2)  # on a page already sent
        await worker.store(41)
        lengths = await rig.exact(1, 3, 40, 41)
        assert lengths == {"prefill-0": 4}
        assert (await rig.match(1, 2))[1] == {"prefill-0": 1}
        assert worker.num_listed == 11  # one pass was enough

    scenario(test)


def test_invalid_event_during_a_resync_restarts_it() -> None:
    async def test(rig: Rig) -> None:
        worker = CacheWorker(rig.network.bus("prefill-0"), rig.clock)
        worker.held = dict.fromkeys(range(1, 11))
        list_page = worker.page

        async def page(query: ListBlocks) -> BlockPage:
            page = list_page(query)
            if worker.num_listed == 1:
                await worker.send_event(BlocksRemoved(block_hashes=b"torn"))
            return page

        worker.page = page  # type: ignore[method-assign, assignment]
        await worker.join()
        await eventually(lambda: worker.num_listed == 6)
        assert await rig.exact(*range(1, 11)) == {"prefill-0": 10}

    scenario(test)


def test_invalid_event_is_repaired_by_a_resync() -> None:
    async def test(rig: Rig) -> None:
        worker = await rig.worker("prefill-0")
        await asyncio.sleep(0.1)
        await worker.store(1, 2)
        await worker.send_event(BlocksRemoved(block_hashes=block(2) + b"torn"))
        await worker.store(3)
        await asyncio.sleep(0.5)
        assert await rig.exact(1, 2, 3) == {"prefill-0": 3}

    scenario(test)


def test_resync_with_endless_pages_fails_and_is_retried() -> None:
    async def test(rig: Rig) -> None:
        worker = CacheWorker(rig.network.bus("prefill-0"), rig.clock)
        worker.held = dict.fromkeys(range(1, 4))
        list_page = worker.page

        def page(query: ListBlocks) -> BlockPage:
            page = list_page(query)
            if worker.num_listed > 20:
                return page
            return msgspec.structs.replace(page, next_cursor=query.cursor)

        worker.page = page  # type: ignore[method-assign]
        await worker.join()
        await asyncio.sleep(2)
        assert worker.num_listed < 10
        assert await rig.exact(1, 2, 3) == {"prefill-0": 3}

    scenario(test)


def test_restarted_worker_starts_empty() -> None:
    async def test(rig: Rig) -> None:
        worker = await rig.worker("prefill-0")
        await asyncio.sleep(0.1)
        await worker.store(1, 2)
        await rig.exact(1)
        rig.network.disconnect("prefill-0")
        await worker.health_monitor._background.stop()
        again = await rig.worker("prefill-0", epoch=2)
        await again.store(2)
        await asyncio.sleep(0.1)
        assert await rig.exact(1, 2) == {}
        assert await rig.exact(2) == {"prefill-0": 1}

    scenario(test)


def test_silent_worker_is_removed_until_it_recovers() -> None:
    async def test(rig: Rig) -> None:
        worker = await rig.worker("prefill-0")
        await asyncio.sleep(0.1)
        await worker.store(1)
        rig.network.freeze("prefill-0")
        await asyncio.sleep(SILENCE_LIMIT_S + 0.5)
        assert await rig.exact(1) == {}
        rig.network.thaw("prefill-0")
        await asyncio.sleep(0.5)
        assert await rig.exact(1) == {"prefill-0": 1}

    scenario(test)


def test_records_are_written_after_a_redis_outage() -> None:
    async def test(rig: Rig) -> None:
        rig.store.is_away = True
        worker = await rig.worker("prefill-0")
        await asyncio.sleep(0.1)
        await worker.store(1, 2)
        await asyncio.sleep(0.001)
        assert await rig.match(1, 2) == ("exact", {"prefill-0": 2})
        await asyncio.sleep(5)
        assert rig.store.data == {}
        rig.store.is_away = False
        await asyncio.sleep(0.3)
        record = rig.store.data[f"hearth:t:prefix:{block(2).hex()}"]
        assert (record[b"hits"], record[b"holder:prefill-0"], record[b"num_tokens"]) == (
            b"1",
            b"1",
            b"32",
        )

    scenario(test)


def test_drain_leaves_the_queue_group_and_flushes_records() -> None:
    async def test(rig: Rig) -> None:
        worker = await rig.worker("prefill-0")
        await asyncio.sleep(0.1)
        await worker.store(1)
        await asyncio.sleep(0.001)
        await rig.service.drain()
        assert f"hearth:t:prefix:{block(1).hex()}" in rig.store.data
        with pytest.raises(NoResponders):
            await rig.match(1)

    scenario(test)


def test_heartbeat_reports_whether_the_index_is_exact() -> None:
    async def test(rig: Rig) -> None:
        states = []
        await rig.scheduler_bus.subscribe(
            HEARTBEATS, Heartbeat, lambda beat: states.append(beat.index)
        )
        worker = await rig.worker("prefill-0")
        await asyncio.sleep(0.6)
        await worker.store(1, 2, 3)
        await asyncio.sleep(2 * HEARTBEAT_INTERVAL_S)
        known = [each for each in states if each is not None]
        assert (known[-1].state, known[-1].num_blocks, known[-1].num_workers) == ("exact", 3, 1)
        rig.network.is_dropped = lambda subject, sender, receiver: subject.endswith("kv_events")
        await worker.remove(2)
        rig.network.is_dropped = lambda subject, sender, receiver: subject.endswith("list_blocks")
        await worker.store(4)
        await asyncio.sleep(2 * HEARTBEAT_INTERVAL_S)
        known = [each for each in states if each is not None]
        assert (known[-1].state, known[-1].num_inexact_workers) == ("degraded", 1)

    scenario(test)


def test_two_replicas_share_queries_and_write_one_record() -> None:
    async def test(rig: Rig) -> None:
        second = rig.replica("kv_index-1")
        await second.start()
        worker = await rig.worker("prefill-0")
        other = await rig.worker("decode-0", "decode")
        await asyncio.sleep(1.0)
        await worker.store(1, 2)
        await other.store(1, 2)
        await asyncio.sleep(0.01)
        replies = [await rig.exact(1, 2, 3) for _ in range(40)]
        assert replies == [{"prefill-0": 2, "decode-0": 2}] * 40
        await other.remove(2)
        await asyncio.sleep(0.5)
        record = rig.store.data[f"hearth:t:prefix:{block(2).hex()}"]
        assert (record[b"hits"], record[b"saved_tokens"]) == (b"40", b"1280")
        assert [name for name in record if name.startswith(b"holder:")] == [b"holder:prefill-0"]
        shares = [each._load().num_matches for each in (rig.service, second)]
        assert sum(shares) == 40 and min(shares) > 0
        await second.stop()

    scenario(test)


def test_uncounted_query_records_no_hit() -> None:
    async def test(rig: Rig) -> None:
        worker = await rig.worker("prefill-0")
        await asyncio.sleep(0.1)
        await worker.store(1)
        await asyncio.sleep(0.01)
        query = MatchPrefix(
            tenant_id="t", model="m", revision="r1", block_hashes=block(1), is_counted=False
        )
        reply = await rig.scheduler_bus.request(MATCH, query, PrefixMatches, timeout_s=1.0)
        assert reply.matches
        await asyncio.sleep(0.5)
        assert b"hits" not in rig.store.data[f"hearth:t:prefix:{block(1).hex()}"]

    scenario(test)


def test_restarted_index_recovers_from_redis_and_workers() -> None:
    async def test(rig: Rig) -> None:
        worker = await rig.worker("prefill-0")
        await asyncio.sleep(0.1)
        await worker.store(1)
        await asyncio.sleep(0.01)
        await rig.exact(1)
        await worker.store(2)  # block 1 is no longer a tip
        await asyncio.sleep(0.5)
        await rig.service.stop()
        rig.network.disconnect("kv_index-0")
        again = rig.replica("kv_index-0")
        await again.start()
        await asyncio.sleep(2.0)
        assert await rig.exact(1, 2) == {"prefill-0": 2}
        assert await rig.exact(1) == {"prefill-0": 1}
        await asyncio.sleep(0.5)
        assert rig.store.data[f"hearth:t:prefix:{block(1).hex()}"][b"hits"] == b"2"
        rig.service = again

    scenario(test)


def test_new_replica_retains_holders_that_it_has_not_heard_of_yet() -> None:
    """Recovery of a tenant's records starts with the first worker; another one is far away."""

    async def test(rig: Rig) -> None:
        for worker_id in ("prefill-0", "prefill-1"):
            worker = await rig.worker(worker_id)
            await asyncio.sleep(0.1)
            await worker.store(1)
            await asyncio.sleep(0.5)
            await worker.store(2)  # block 1 is no longer a tip
        await asyncio.sleep(0.5)
        rig.network.distance_s = lambda sender, _: 0.4 if sender == "prefill-1" else 0.0
        replica = rig.replica("kv_index-1")
        await replica.start()
        await asyncio.sleep(3.0)
        record = rig.store.data[f"hearth:t:prefix:{block(1).hex()}"]
        assert {b"holder:prefill-0", b"holder:prefill-1"} <= record.keys()
        await replica.stop()

    scenario(test)


async def test_service_runs_on_real_servers(
    nats_server: NatsServer, redis_server: RedisServer
) -> None:
    async with AsyncExitStack() as stack:
        service = await build_kv_index(
            KvIndexConfig(
                nats_url=nats_server.url("kv_index-1"),
                process_id="kv_index-1",
                redis_url=redis_server.url,
            )
        )
        stack.push_async_callback(service.stop)
        await service.start()
        prefill = await NatsBus.connect(nats_server.url("prefill-1"), process_id="prefill-1")
        stack.push_async_callback(prefill.close)
        worker = CacheWorker(prefill, MonotonicClock())  # type: ignore[arg-type]
        worker.held = dict.fromkeys(range(1, 7))
        await worker.join()
        stack.push_async_callback(worker.health_monitor.stop)
        scheduler = await NatsBus.connect(nats_server.url("scheduler-1"), process_id="scheduler-1")
        stack.push_async_callback(scheduler.close)
        await _wait_for_matches(scheduler, {"prefill-1": 6}, *range(1, 7))
        await worker.store(7)
        await _wait_for_matches(scheduler, {"prefill-1": 7}, *range(1, 8))
        await service.drain()
        store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=LIMIT_S)
        stack.push_async_callback(store.close)
        record = await store.hash_get(f"hearth:t:prefix:{block(7).hex()}")
        assert record[b"holder:prefill-1"] == b"1"


async def _wait_for_matches(bus: NatsBus, expected: dict[str, int], *numbers: int) -> None:
    """Queries until the matches are as expected; each query is a round trip, not a sleep."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                if await all_matches(bus, *numbers) == ("exact", expected):  # type: ignore[arg-type]
                    return
            except HearthError:
                continue
