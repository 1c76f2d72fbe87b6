"""Overload and missing capacity: a response in bounded time with Retry-After."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.chaos.world.clients import Exchange, converse
from tests.chaos.world.cluster import ChaosCluster
from tests.chaos.world.workload import requests

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE_OF_EACH = ("kv_index-1", "scheduler-1", "prefill-1", "decode-1", "gateway-1")
NUM_BLOCKS = 128  # for a few requests
PATIENCE_S = 30.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosCluster]:
    """One of each service, with little capacity."""
    folder: Path = tmp_path_factory.mktemp("small")
    small = ChaosCluster(
        folder,
        step_s=0.01,
        services=ONE_OF_EACH,
        worker_options={"kv-cache-bytes": str(NUM_BLOCKS * 256)},
        scheduler_options={"max-queued-requests": "8"},
    )
    try:
        await small.start()
        yield small
    finally:
        small.stop()


async def ask(cluster: ChaosCluster, number: int, api_key: str = "") -> Exchange:
    path, body = requests()[number % 32]
    exchange = Exchange({**body, "cache_salt": str(number), "stream": number % 3 > 0}, "gateway-1")
    if not exchange.body["stream"]:
        del exchange.body["stream_options"]
    async with asyncio.timeout(PATIENCE_S):
        url = cluster.urls["gateway-1"]
        return await converse(exchange, url, api_key or cluster.api_key, path)


async def test_overload_is_429_with_a_time_to_come_again(cluster: ChaosCluster) -> None:
    answers = await asyncio.gather(*(ask(cluster, number) for number in range(80)))
    statuses = {each.status for each in answers}
    assert statuses == {200, 429}, [*map(str, answers)]
    assert all(each.has_retry_after for each in answers if each.status == 429)
    assert (await ask(cluster, 1)).status == 200  # and afterwards requests succeed again


async def test_lost_capacity_is_503_until_it_is_back(cluster: ChaosCluster) -> None:
    for name in ("decode-1", "scheduler-1"):
        cluster.kill(name)
        answers = await asyncio.gather(*(ask(cluster, number) for number in range(6)))
        assert {each.status for each in answers} == {503}, [*map(str, answers)]
        assert all(each.has_retry_after for each in answers)
        await cluster.restart(name)
        await cluster.wait_until_ready()
        assert (await ask(cluster, 1)).status == 200


async def test_without_redis_known_tenants_are_served_and_strangers_wait(
    cluster: ChaosCluster,
) -> None:
    assert (await ask(cluster, 1)).status == 200
    cluster.kill("redis-server")
    answers = await asyncio.gather(*(ask(cluster, number) for number in range(6)))
    assert {each.status for each in answers} == {200}, [*map(str, answers)]
    stranger = await ask(cluster, 1, "hearth-nobody-knows")
    assert (stranger.status, stranger.has_retry_after) == (503, True)
    await cluster.restart("redis-server")
    assert (await ask(cluster, 1, "hearth-nobody-knows")).status == 401
    assert (await ask(cluster, 1)).status == 200


async def test_without_prefill_workers_and_index_decode_does_it_all(cluster: ChaosCluster) -> None:
    for name in ("prefill-1", "kv_index-1"):
        cluster.kill(name)
    answers = await asyncio.gather(*(ask(cluster, number) for number in range(6)))
    assert {each.status for each in answers} == {200}, [*map(str, answers)]
