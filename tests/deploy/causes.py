"""What breaks in each scenario, and its repair."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import redis.asyncio

from services.cli.cluster.service_options import DEMO_MODEL_NAME
from shared.clock import MonotonicClock
from shared.store import RedisStore
from shared.tenancy.deletion import kv_drops
from shared.tenancy.tenant_admin import TenantAdmin, new_api_key, save_api_key
from tests.chaos.world.workload import Body, requests
from tests.support.cluster.chaos_cluster import ChaosCluster
from tests.support.cluster.clients import Exchange, run_exchange
from tests.support.servers import free_port
from tests.support.waiting import LIMIT_S

FILLED_BYTES, NUM_FOREIGN = 64 << 20, 256
NUM_OUTAGES = 4
OUTAGE_S, PAUSE_S = 0.5, 5.0
COLLECTOR_PORT = free_port()
NUM_TRACED = 16
EXPORT_S = 10.0  # spans leave after their requests, with retries
ENDED_S = 10.0
NUM_LOGGED = 400  # requests, each with a line of 400 bytes or more: a pipe holds 64 KiB
LOGGED_TIMEOUT_S = 20.0
NUM_TENANTS, NUM_BODIES_EACH = 12, 2  # a gateway prepares two requests of a tenant at once
LARGE_CHARS = 900_000
WORDS = ("kv", "cache", "block", "größe", "12345", "\n")


async def freeze_decode(cluster: ChaosCluster) -> None:
    cluster.freeze("decode-1")


async def thaw_decode(cluster: ChaosCluster) -> None:
    cluster.thaw("decode-1")


async def freeze_redis(cluster: ChaosCluster) -> None:
    cluster.freeze("redis-server")


async def thaw_redis(cluster: ChaosCluster) -> None:
    cluster.thaw("redis-server")


async def ask_in_the_wrong_region(cluster: ChaosCluster) -> None:
    """A tenant of another region asks a gateway, which has none."""
    api_key = new_api_key()
    async with store_of(cluster) as store:
        await TenantAdmin(store, time.time).add("bound", {"allowed_regions": ("eu",)}, api_key)
    headers = {"authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(headers=headers, trust_env=False) as client:
        for url in cluster.urls.values():
            reply = await client.get(f"{url}/v1/models")
            assert reply.status_code == 403, reply.text


async def remove_without_index(cluster: ChaosCluster) -> None:
    """The index hangs, and a tenant is removed."""
    cluster.freeze("kv_index-1")
    async with store_of(cluster) as store:
        await kv_drops.order(store, "gone", "removed", time.time())


async def thaw_index(cluster: ChaosCluster) -> None:
    cluster.thaw("kv_index-1")


@asynccontextmanager
async def store_of(cluster: ChaosCluster) -> AsyncIterator[RedisStore]:
    store = RedisStore(cluster.redis_url, MonotonicClock(), timeout_s=LIMIT_S)
    try:
        yield store
    finally:
        await store.close()


async def fill_redis(cluster: ChaosCluster) -> None:
    """Others fill a Redis that is as large as what it holds and 64 MiB."""
    client = redis.asyncio.Redis.from_url(cluster.redis_url)
    used = (await client.info("memory"))["used_memory"]
    await client.config_set("maxmemory", used + FILLED_BYTES)
    for number in range(NUM_FOREIGN):
        await client.set(f"foreign:{number}", bytes(FILLED_BYTES // NUM_FOREIGN * 15 // 16))
    await client.aclose()


async def restart_nats(cluster: ChaosCluster) -> None:
    for _ in range(NUM_OUTAGES):
        cluster.kill("nats-server")
        await asyncio.sleep(OUTAGE_S)
        await cluster.restart("nats-server")
        await asyncio.sleep(PAUSE_S)


async def kill_decodes(cluster: ChaosCluster) -> None:
    for name in cluster.named("decode"):
        cluster.kill(name)


async def restart_decodes(cluster: ChaosCluster) -> None:
    for name in cluster.named("decode"):
        await cluster.restart(name)


async def break_device(cluster: ChaosCluster) -> None:
    """A supervisor starts the worker again at once."""
    cluster.break_device("decode-1")
    await cluster.ended("decode-1", ENDED_S)
    await cluster.restart("decode-1")


async def forbid_lists(cluster: ChaosCluster) -> None:
    """An operator's NATS permissions do not let the index ask workers for their blocks, and the
    index is restarted.
    """
    path = cluster.folder / "nats.conf"
    wanted = '"hearth.v1.*.*.*.list_blocks.kv_index-1.*", '
    text = path.read_text()
    assert wanted in text
    path.write_text(text.replace(wanted, ""))
    os.kill(cluster.pid("nats-server"), signal.SIGHUP)
    cluster.kill("kv_index-1")
    await cluster.restart("kv_index-1")


async def fill_log(cluster: ChaosCluster) -> None:
    """Requests end until the pipe with the log of the gateway is full: its next line blocks it."""
    url = cluster.urls["gateway-1"]
    for path, body in [*requests()] * (NUM_LOGGED // len(requests())):
        exchange = Exchange({**body, "max_tokens": 1, "n": 1}, "gateway-1")
        sending = run_exchange(exchange, url, cluster.api_key, path)
        try:
            await asyncio.wait_for(sending, LOGGED_TIMEOUT_S)
        except TimeoutError:
            return
    raise AssertionError(f"{NUM_LOGGED} requests do not fill the pipe")


async def send_large_bodies(cluster: ChaosCluster) -> None:
    """Tenants send more large bodies at once than the processes of one gateway can prepare."""
    gateway, url = [*cluster.urls.items()][-1]
    words = random.Random(0).choices(WORDS, k=LARGE_CHARS)
    body: Body = {"model": DEMO_MODEL_NAME, "prompt": " ".join(words)[:LARGE_CHARS]}

    async def send(api_key: str) -> None:
        while True:
            await run_exchange(Exchange(body, gateway), url, api_key, "/tokenize")

    keys = [new_api_key() for _ in range(NUM_TENANTS)]
    for number, key in enumerate(keys):
        await save_api_key(cluster.redis_url, key, f"tenant-{number}")
    async with asyncio.TaskGroup() as group:
        for each in keys * NUM_BODIES_EACH:
            group.create_task(send(each))


async def fail_collector(cluster: ChaosCluster) -> None:
    """Requests end while the collector of traces answers 500 to the gateway that is
    scraped, which sends their spans.
    """
    gateway, url = [*cluster.urls.items()][-1]
    async with _collector_that_fails():
        for path, body in requests(NUM_TRACED):
            exchange = Exchange({**body, "max_tokens": 2, "n": 1}, gateway)
            await run_exchange(exchange, url, cluster.api_key, path)
        await asyncio.sleep(EXPORT_S)


@asynccontextmanager
async def _collector_that_fails() -> AsyncIterator[None]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n")
        writer.write(b"connection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", COLLECTOR_PORT):
        yield


async def nothing(cluster: ChaosCluster) -> None:
    return None
