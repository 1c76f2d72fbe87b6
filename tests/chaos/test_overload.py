"""Overload and missing capacity: a response in bounded time with Retry-After."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.gateway.http.connections import MAX_WITHOUT_KEY
from tests.chaos.world.workload import requests
from tests.support.cluster.chaos_cluster import ChaosCluster
from tests.support.cluster.clients import Exchange, run_exchange
from tests.support.waiting import LIMIT_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE_OF_EACH = ("kv_index-1", "scheduler-1", "prefill-1", "decode-1", "gateway-1")
NUM_BLOCKS = 128  # enough for a few requests
NUM_OUTPUT_TOKENS = 40
RESPONSE_TIMEOUT_S = LIMIT_S
NUM_REQUESTS = MAX_WITHOUT_KEY - 4  # more from one address must send their heads within seconds


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosCluster]:
    """One of each service, with little capacity."""
    folder: Path = tmp_path_factory.mktemp("small")
    small = ChaosCluster(
        folder,
        step_s=0.005,
        services=ONE_OF_EACH,
        worker_options={"kv-cache-bytes": str(NUM_BLOCKS * 256)},
        scheduler_options={"max-queued-requests": "8"},
    )
    try:
        await small.start()
        yield small
    finally:
        small.stop()


async def send(cluster: ChaosCluster, number: int, api_key: str = "") -> Exchange:
    path, body = requests()[number % 32]
    changes = {"cache_salt": str(number), "stream": number % 3 > 0, "max_tokens": NUM_OUTPUT_TOKENS}
    exchange = Exchange({**body, **changes}, "gateway-1")
    if not exchange.body["stream"]:
        del exchange.body["stream_options"]
    async with asyncio.timeout(RESPONSE_TIMEOUT_S):
        url = cluster.urls["gateway-1"]
        return await run_exchange(exchange, url, api_key or cluster.api_key, path)


async def test_overload_is_429_with_retry_after(cluster: ChaosCluster) -> None:
    responses = await asyncio.gather(*(send(cluster, number) for number in range(NUM_REQUESTS)))
    statuses = {each.status for each in responses}
    assert statuses == {200, 429}, [*map(str, responses)]
    assert all(each.has_retry_after for each in responses if each.status == 429)
    assert (await send(cluster, 1)).status == 200  # later requests succeed again


async def test_lost_capacity_is_503_until_restart(cluster: ChaosCluster) -> None:
    for name in ("decode-1", "scheduler-1"):
        cluster.kill(name)
        responses = await asyncio.gather(*(send(cluster, number) for number in range(6)))
        assert {each.status for each in responses} == {503}, [*map(str, responses)]
        assert all(each.has_retry_after for each in responses)
        await cluster.restart(name)
        await cluster.wait_until_ready()
        assert (await send(cluster, 1)).status == 200


async def test_only_known_tenants_are_served_without_redis(
    cluster: ChaosCluster,
) -> None:
    assert (await send(cluster, 1)).status == 200
    cluster.kill("redis-server")
    responses = await asyncio.gather(*(send(cluster, number) for number in range(6)))
    assert {each.status for each in responses} == {200}, [*map(str, responses)]
    unknown = await send(cluster, 1, "hearth-nobody-knows")
    assert (unknown.status, unknown.has_retry_after) == (503, True)
    await cluster.restart("redis-server")

    async def is_refused() -> bool:
        return (await send(cluster, 1, "hearth-nobody-knows")).status == 401

    await until(is_refused)  # the gateway connects again
    assert (await send(cluster, 1)).status == 200


async def test_decode_alone_serves_without_prefill_and_index(cluster: ChaosCluster) -> None:
    killed = ("prefill-1", "kv_index-1")
    for name in killed:
        cluster.kill(name)
    responses = await asyncio.gather(*(send(cluster, number) for number in range(6)))
    assert {each.status for each in responses} == {200}, [*map(str, responses)]
    for name in killed:
        await cluster.restart(name)
    await cluster.wait_until_ready()  # for other tests
