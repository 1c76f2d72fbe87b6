"""The memory of a real Redis, and what stored responses and prefixes may take of it."""

from __future__ import annotations

from services.gateway.observability.metrics.gateway_metrics import GatewayMetrics
from services.gateway.observability.metrics.redis import MemoryUse
from services.gateway.tenancy.redis_memory import RedisMemory
from shared.clock import MonotonicClock
from shared.store import RedisStore
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S


async def test_bounds_follow_the_memory_of_redis(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=LIMIT_S)
    memory = RedisMemory(store, MonotonicClock())
    metrics = GatewayMetrics("gateway-1")
    metrics.watch_redis(lambda: memory.use)
    assert b"hearth_redis_used_memory_bytes" not in metrics.render()
    for limit, responses, prefixes in ((0, 512 << 20, 256 << 20), (100 << 20, 50 << 20, 25 << 20)):
        await store._redis.config_set("maxmemory", str(limit))
        await memory.read()
        assert (memory.max_response_bytes, memory.max_prefix_bytes) == (responses, prefixes)
        assert memory.use is not None and memory.use.used > 100_000
        assert memory.use.limit == limit and b"hearth_redis_max_memory_bytes" in metrics.render()
    await store._redis.config_set("maxmemory", "0")
    own = RedisMemory(store, MonotonicClock(), max_response_bytes=1, max_prefix_bytes=2)
    assert (own.max_response_bytes, own.max_prefix_bytes) == (1, 2)
    await store.close()


async def test_away_redis_keeps_its_bounds() -> None:
    memory = RedisMemory(RedisStore("redis://127.0.0.1:1/0", MonotonicClock()), MonotonicClock())
    memory.use, memory._max_bytes = MemoryUse(1, 100), 100
    await memory.read()
    assert memory.use is None and memory.max_response_bytes == 50
