"""M1: 200 clients of 20 tenants request large responses, half of them streams, and read nothing.

While responses are generated, clients take 4 KiB twice a second, so that all are held at once
however long that takes; from the last token on they take nothing, and their time begins. RSS is
that of the gateway's main process, its largest from before the requests until all clients are gone.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.adversity.cores import pinned
from benchmarks.adversity.turns import Victim
from benchmarks.adversity.unread import NUM_CONNECTIONS, PATIENCE_S
from benchmarks.report import Bar, at_least, at_most
from benchmarks.serving.hearth import ROOT, SPLIT, hearth
from shared.clock import MonotonicClock
from shared.store import RedisStore
from shared.tenancy.tenant_admin import TenantAdmin, new_api_key
from tests.servers import RedisServer

NUM_TENANTS = 20
MAX_RSS_MIB = 384
MAX_GONE_S = 35.0
SAMPLE_S = 0.1
MAX_S = 2 * PATIENCE_S
MIB = 1 << 20
ENDED = "hearth_gateway_requests_total{"
GENERATED = ENDED + 'outcome="length"'
SLOW_CLIENTS = "hearth_gateway_slow_clients_total "


async def measure(rows: Sequence[str]) -> list[Bar]:
    redis = RedisServer()
    with tempfile.TemporaryDirectory() as folder:
        cluster = hearth(SPLIT, Path(folder), step_s=0.0, redis=redis)
        async with cluster as (target, processes), pinned(processes):
            victim = Victim(target)
            await victim.turn(2.0)  # what the first requests load is not the slow clients'
            victim.close()
            keys = await _new_keys(redis.url)
            return await _measure(target.url, keys, processes["gateway"])


async def _new_keys(redis_url: str) -> list[str]:
    store = RedisStore(redis_url, MonotonicClock(), timeout_s=2.0)
    admin, keys = TenantAdmin(store, time.time), []
    for number in range(NUM_TENANTS):
        keys.append(new_api_key())
        await admin.add(f"slow-{number}", {}, keys[-1])
    await store.close()
    return keys


async def _measure(url: str, keys: list[str], gateway: psutil.Process) -> list[Bar]:
    idle = gateway.memory_info().rss
    clients = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.adversity.unread", url, *keys),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        seen = await _watched(url, gateway, clients)
    finally:
        if clients.returncode is None:
            clients.kill()
            await clients.wait()
    return [
        at_least("M1: unread responses at once", seen.num_unread, NUM_CONNECTIONS, "responses"),
        at_most("M1: gateway's RSS above idle", (seen.rss - idle) / MIB, MAX_RSS_MIB, "MiB"),
        at_most("M1: all gone after", seen.gone_at - seen.generated_at, MAX_GONE_S, "s"),
        at_least("M1: connections closed", seen.num_closed, NUM_CONNECTIONS, "connections"),
    ]


@dataclass
class Seen:
    """The largest RSS in bytes, and times in seconds. `num_unread`: responses that are held when
    the last token has been generated.
    """

    rss: int = 0
    num_unread: int = 0
    generated_at: float = 0.0
    gone_at: float = 0.0
    num_closed: int = 0


async def _watched(url: str, gateway: psutil.Process, clients: Process) -> Seen:
    """Returns when all clients are gone."""
    assert clients.stdin is not None and clients.stdout is not None, "pipes"
    seen, output = Seen(), asyncio.create_task(clients.stdout.read())
    async with httpx.AsyncClient(timeout=30, trust_env=False) as http, asyncio.timeout(MAX_S):
        metrics = (await http.get(f"{url}/metrics")).text
        before, generated_before = _total(metrics, ENDED), _total(metrics, GENERATED)
        while not output.done():
            seen.rss = max(seen.rss, gateway.memory_info().rss)
            await asyncio.wait([output], timeout=SAMPLE_S)
            if seen.generated_at:
                continue
            metrics = (await http.get(f"{url}/metrics")).text
            if _total(metrics, ENDED) - before >= NUM_CONNECTIONS:
                clients.stdin.write(b"\n")
                num_generated = _total(metrics, GENERATED) - generated_before
                seen.num_unread = int(num_generated - _total(metrics, SLOW_CLIENTS))
                seen.generated_at = time.monotonic()
    seen.gone_at, seen.num_closed = time.monotonic(), int(output.result())
    return seen


def _total(metrics: str, name: str) -> float:
    """The sum over a metric's labels."""
    lines = (line for line in metrics.splitlines() if line.startswith(name))
    return sum(float(line.rpartition(" ")[2]) for line in lines)
