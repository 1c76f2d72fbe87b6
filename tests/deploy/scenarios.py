"""Real faults of a cluster, and the alerts that each of them raises."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.clock import MonotonicClock
from shared.store import RedisStore
from shared.tenancy.tenant_admin import TenantAdmin
from tests.chaos.running import WORKERS
from tests.chaos.world.clients import Exchange, run_exchange
from tests.chaos.world.cluster import ChaosCluster
from tests.chaos.world.workload import requests

NUM_STREAMS = 24
OUTPUT_TOKENS = 4000  # more than a stream gets within a scenario
NUM_OUTAGES = 4
OUTAGE_S, PAUSE_S = 0.5, 5.0
NUM_CLIENTS = 64
SHORT_OUTPUT_TOKENS = 400
REJECTED_PAUSE_S, LIMITED_PAUSE_S = 0.5, 1.0
OVERLOAD_S = 345.0  # the rules wait for 5 minutes
MAX_SHORT_S = 60.0

Step = Callable[[ChaosCluster], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Scenario:
    """`lasts_s`: from the fault until all its alerts are raised, with the rules' own `for`.
    `has_streams`: long ones are open when it happens. `workers`: their options.
    """

    name: str
    alerts: tuple[str, ...]
    lasts_s: float
    cause: Step
    repair: Step
    has_streams: bool = True
    workers: Mapping[str, str] = field(default_factory=lambda: WORKERS)

    @property
    def is_short(self) -> bool:
        return self.lasts_s < MAX_SHORT_S


async def _freeze_decode(cluster: ChaosCluster) -> None:
    cluster.freeze("decode-1")


async def _thaw_decode(cluster: ChaosCluster) -> None:
    cluster.thaw("decode-1")


async def _freeze_redis(cluster: ChaosCluster) -> None:
    cluster.freeze("redis-server")


async def _thaw_redis(cluster: ChaosCluster) -> None:
    cluster.thaw("redis-server")


async def _restart_nats(cluster: ChaosCluster) -> None:
    for _ in range(NUM_OUTAGES):
        cluster.kill("nats-server")
        await asyncio.sleep(OUTAGE_S)
        await cluster.restart("nats-server")
        await asyncio.sleep(PAUSE_S)


async def _kill_decodes(cluster: ChaosCluster) -> None:
    for name in cluster.named("decode"):
        cluster.kill(name)


async def _restart_decodes(cluster: ChaosCluster) -> None:
    for name in cluster.named("decode"):
        await cluster.restart(name)


async def _overload(cluster: ChaosCluster) -> None:
    """More clients than the workers have room for, and one whose tenant may send one a minute."""
    store = RedisStore(cluster.redis_url, MonotonicClock(), timeout_s=2.0)
    limited_key = "key-of-limited"
    await TenantAdmin(store, time.time).add("limited", {"requests_per_min": 1}, limited_key)
    await store.close()
    clients = [_client(cluster, n, cluster.api_key, 0.0) for n in range(NUM_CLIENTS)]
    limited = _client(cluster, 0, limited_key, LIMITED_PAUSE_S)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(OVERLOAD_S):
            await asyncio.gather(*clients, limited)


async def _client(cluster: ChaosCluster, number: int, api_key: str, pause_s: float) -> None:
    gateways = [*cluster.urls]
    path, body = requests(NUM_STREAMS)[number % NUM_STREAMS]
    gateway = gateways[number % len(gateways)]
    while True:
        exchange = Exchange({**body, "max_tokens": SHORT_OUTPUT_TOKENS, "n": 1}, gateway)
        await run_exchange(exchange, cluster.urls[gateway], api_key, path)
        await asyncio.sleep(pause_s if exchange.is_successful else max(pause_s, REJECTED_PAUSE_S))


async def _nothing(cluster: ChaosCluster) -> None:
    return None


SCENARIOS = (
    Scenario(
        "frozen_decode",
        ("HearthProcessLost", "HearthResubmissions"),
        25.0,
        _freeze_decode,
        _thaw_decode,
    ),
    Scenario("frozen_redis", ("HearthRedisAway",), 25.0, _freeze_redis, _thaw_redis),
    Scenario("restarted_nats", ("HearthNatsUnstable",), 10.0, _restart_nats, _nothing),
    Scenario("killed_decodes", ("HearthNoDecodeWorker",), 45.0, _kill_decodes, _restart_decodes),
    Scenario(
        "overload",
        ("HearthQueueAge", "HearthSlowFirstToken", "HearthRequestsRejected"),
        OVERLOAD_S - 5.0,
        _overload,
        _nothing,
        has_streams=False,
        workers={**WORKERS, "max-sequences": "8"},
    ),
)


@contextlib.asynccontextmanager
async def streams(cluster: ChaosCluster) -> AsyncIterator[None]:
    """Long streams that are open, over all gateways, until the end of the block."""
    gateways = [*cluster.urls]
    tasks, exchanges = [], []
    for number, (path, body) in enumerate(requests(NUM_STREAMS)):
        gateway = gateways[number % len(gateways)]
        exchange = Exchange({**body, "max_tokens": OUTPUT_TOKENS, "n": 1}, gateway)
        sending = run_exchange(exchange, cluster.urls[gateway], cluster.api_key, path)
        tasks.append(asyncio.create_task(sending))
        exchanges.append(exchange)
    await asyncio.gather(*(each.first_event.wait() for each in exchanges))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
