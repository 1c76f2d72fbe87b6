from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest

from shared.clock import MonotonicClock
from shared.messages import StoreLoad
from shared.store import (
    BREAKER_S,
    MAX_AT_ONCE,
    REJECTION_SHOWN_S,
    RedisStore,
    StoreRejected,
    StoreUnavailable,
)
from tests.support.servers import RedisServer, free_port
from tests.support.waiting import LIMIT_S, until
from tests.support.world.store import MemoryStore


class ManualClock:
    def __init__(self) -> None:
        self.at = 10.0

    def now(self) -> float:
        return self.at

    async def sleep(self, delay_s: float) -> None:
        self.at += delay_s


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    store = RedisStore(redis_server.url, ManualClock(), timeout_s=LIMIT_S)
    yield store
    await store.close()


COMMANDS = [
    ("SET", "s:text", "value"),
    ("SET", "s:short", b"\x00\xff", "EX", 60),
    ("INCRBY", "s:count", 3),
    ("INCRBY", "s:count", 4),
    ("HSET", "s:hash", "a", 1, "b", "two"),
    ("HINCRBY", "s:hash", "a", 5),
    ("HSET", "s:hash", "gone", 1),
    ("HDEL", "s:hash", "gone"),
    ("HSETNX", "s:hash", "b", "three"),
    ("HSETNX", "s:hash", "c", "four"),
    ("ZADD", "s:set", 3, "c", 1, "a", 2, "b", 2, "bb"),
    ("ZREM", "s:set", "b"),
    ("ZADD", "s:bounded", 1, "a", 2, "b", 3, "c"),
    ("ZADD", "s:bounded", "GT", 1, "c", 9, "z"),
    ("SET", "s:gone", 1),
    ("DEL", "s:gone"),
    ("HSET", "s:numbers", "large", 2**63 - 1, "small", 0.1),
    ("HINCRBY", "s:numbers", "exact", 2**53 + 1),
]


async def test_simulated_store_matches_redis(store: RedisStore) -> None:
    memory = MemoryStore()
    for each in (store, memory):
        await each.write(COMMANDS)
    for key in ("s:text", "s:short", "s:count", "s:gone"):
        assert await memory.get(key) == await store.get(key)
    for key in ("s:hash", "s:none", "s:numbers"):
        assert await memory.hash_get(key) == await store.hash_get(key)
    for key in ("s:set", "s:bounded", "s:none"):
        assert await memory.sorted_set_head(key, 2) == await store.sorted_set_head(key, 2)
    assert await store.get("s:count") == b"7"
    assert await store.sorted_set_head("s:bounded", 9) == [b"a", b"b", b"c", b"z"]
    for key in ("s:set", "s:none"):
        assert await memory.sorted_set_size(key) == await store.sorted_set_size(key)


async def test_rejected_command_does_not_stop_later_commands(store: RedisStore) -> None:
    writes = [("SET", "r:text", 1), ("HSET", "r:text", "a", 1), ("SET", "r:next", 2)]
    with pytest.raises(StoreRejected, match="WRONGTYPE"):
        await store.write(writes)
    assert await store.get("r:next") == b"2"  # the breaker is still closed


async def test_too_long_command_does_not_stop_later_commands(
    store: RedisStore,
) -> None:
    writes = [("HDEL", "r:hash", *(str(each) for each in range(20_000))), ("SET", "r:after", 3)]
    with pytest.raises(StoreRejected, match="unpack"):
        await store.write(writes)
    assert await store.get("r:after") == b"3"


async def test_missing_redis_opens_the_breaker() -> None:
    clock = ManualClock()
    store = RedisStore(f"redis://127.0.0.1:{free_port()}", clock)
    with pytest.raises(StoreUnavailable, match="does not answer"):
        await store.get("key")
    with pytest.raises(StoreUnavailable, match="is unavailable"):
        await store.get("key")
    with pytest.raises(StoreUnavailable, match="is unavailable"):
        await store.write([("SET", "a", 1)])
    assert store.load() == StoreLoad(is_away=True, num_failures=1)
    clock.at += BREAKER_S
    with pytest.raises(StoreUnavailable, match="does not answer"):
        await store.get("key")
    assert store.load().num_failures == 2  # the breaker's own answers are no failures
    await store.close()


async def test_redis_that_rejects_writes_is_shown_until_it_takes_them() -> None:
    server, clock = RedisServer(), ManualClock()
    store = RedisStore(server.url, clock, timeout_s=LIMIT_S)
    try:
        assert not store.load().rejects_writes
        await store._redis.config_set("maxmemory", "1")
        for write in (
            lambda: store.write([("SET", "a", "b")]),
            lambda: store.evaluate("redis.call('SET', 'a', 'b')", [], []),
        ):
            with pytest.raises(StoreRejected, match="OOM"):
                await write()
            assert store.load() == StoreLoad(rejects_writes=True)
            clock.at += REJECTION_SHOWN_S
            assert not store.load().rejects_writes
    finally:
        await store.close()
        server.stop()


async def test_call_to_hanging_redis_ends_at_timeout() -> None:
    server, clock = RedisServer(), ManualClock()
    store = RedisStore(server.url, clock, timeout_s=0.05)
    try:
        await store.write([("SET", "a", 1)])
        os.kill(server.pid, signal.SIGSTOP)
        started_at = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await store.get("a")
        assert time.monotonic() - started_at < LIMIT_S / 2
        os.kill(server.pid, signal.SIGCONT)
        clock.at += BREAKER_S
        async with asyncio.timeout(LIMIT_S):
            assert await _get_when_available(store, clock) == b"1"
        assert (store.load().is_away, store.load().num_reconnects) == (False, 1)
    finally:
        await store.close()
        server.stop()


@pytest.mark.parametrize(("max_at_once", "num_calls"), [(4, 40), (MAX_AT_ONCE, 101)])
async def test_burst_of_calls_shares_few_connections(
    redis_server: RedisServer, max_at_once: int, num_calls: int
) -> None:
    """redis-py gives a pool 100 connections if it is not told how many."""
    store = RedisStore(redis_server.url, ManualClock(), timeout_s=LIMIT_S, max_at_once=max_at_once)
    async with asyncio.timeout(LIMIT_S):
        ended = await asyncio.gather(*(store.get("key") for _ in range(num_calls)))
    assert ended == [None] * num_calls
    assert store.load() == StoreLoad()
    assert len(store._redis.connection_pool._available_connections) <= max_at_once
    await store.close()


async def test_calls_behind_others_do_not_wait_for_a_hanging_redis() -> None:
    server = RedisServer()
    store = RedisStore(server.url, ManualClock(), timeout_s=0.05, max_at_once=4)
    try:
        os.kill(server.pid, signal.SIGSTOP)
        async with asyncio.timeout(LIMIT_S):
            calls = (store.get("key") for _ in range(40))
            ended = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(each) for each in ended} == {StoreUnavailable}
        assert store.load().num_failures <= 4
        store._clock.at += BREAKER_S
        calls = [asyncio.ensure_future(store.get("key")) for _ in range(40)]
        await until(lambda: len(store._calls) > 4)
        await store.close()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(each) for each in ended} <= {asyncio.CancelledError, StoreUnavailable}
        assert not store._calls
    finally:
        await store.close()
        os.kill(server.pid, signal.SIGCONT)
        server.stop()


async def test_late_reply_is_waited_for_while_redis_answers(
    store: RedisStore, redis_server: RedisServer
) -> None:
    """Longer than what its round trips take, as on a busy server."""
    near = RedisStore(redis_server.url, MonotonicClock())
    for _ in range(20):
        await near.get("key")
    await store._redis.client_pause(300)
    assert await near.get("key") is None
    assert near.load() == StoreLoad()
    await near.close()


async def test_busy_event_loop_is_no_late_reply(redis_server: RedisServer) -> None:
    """Each turn of the loop takes as long as a call may wait, and a call takes some turns."""
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=0.02)
    await store.get("key")
    loop, is_over = asyncio.get_running_loop(), False

    def work() -> None:
        time.sleep(0.02)
        if not is_over:
            loop.call_soon(work)

    loop.call_soon(work)
    try:
        assert await store.get("key") is None
        assert store.load() == StoreLoad()
    finally:
        is_over = True
        await store.close()


async def _get_when_available(store: RedisStore, clock: ManualClock) -> bytes | None:
    while True:
        try:
            return await store.get("a")
        except StoreUnavailable:
            clock.at += BREAKER_S
