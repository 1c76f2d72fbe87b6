"""Real faults of a cluster, and the alerts that each of them raises."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.chaos.world.clients import Exchange, run_exchange
from tests.chaos.world.cluster import ChaosCluster
from tests.chaos.world.workload import requests
from tests.deploy.scenario import Scenario
from tests.servers import free_port

NUM_STREAMS = 24
OUTPUT_TOKENS = 4000  # more than a stream gets within a scenario
NUM_OUTAGES = 4
OUTAGE_S, PAUSE_S = 0.5, 5.0
COLLECTOR_PORT = free_port()
NUM_TRACED = 16
EXPORT_S = 10.0  # spans leave after their requests, with retries


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


async def _fail_collector(cluster: ChaosCluster) -> None:
    """Requests end while the collector of traces answers 500 to the gateway that is
    scraped, which sends their spans.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n")
        writer.write(b"connection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    gateway, url = [*cluster.urls.items()][-1]
    async with await asyncio.start_server(answer, "127.0.0.1", COLLECTOR_PORT):
        for path, body in requests(NUM_TRACED):
            exchange = Exchange({**body, "max_tokens": 2, "n": 1}, gateway)
            await run_exchange(exchange, url, cluster.api_key, path)
        await asyncio.sleep(EXPORT_S)


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
        "failed_collector",
        ("HearthSpansDropped",),
        25.0,
        _fail_collector,
        _nothing,
        {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{COLLECTOR_PORT}"},
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
