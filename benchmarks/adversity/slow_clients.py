"""M1: 200 clients of 20 tenants request large responses, half of them streams, and read nothing.

RSS is that of the gateway's main process, sampled from before the requests until all clients are
gone. Their time begins when the last token of the last response has been generated.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
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
METRICS_S = 0.5
MIB = 1 << 20
OPEN_STREAMS = "hearth_gateway_open_streams "
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
    command = (sys.executable, "-m", "benchmarks.adversity.unread", url, *keys)
    clients = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        seen = await _watched(url, gateway, asyncio.create_task(_output(clients)))
    finally:
        if clients.returncode is None:
            clients.kill()
            await clients.wait()
    return [
        at_most("M1: gateway's RSS above idle", (seen.rss - idle) / MIB, MAX_RSS_MIB, "MiB"),
        at_most("M1: all gone after", seen.gone_at - seen.generated_at, MAX_GONE_S, "s"),
        at_least("M1: connections closed", seen.num_closed, NUM_CONNECTIONS, "connections"),
        at_least("M1: unread at once", seen.num_unread, NUM_CONNECTIONS, "responses"),
    ]


@dataclass
class Seen:
    """The largest RSS in bytes, and times in seconds. `num_unread`: of responses at a time, of
    which all tokens were generated.
    """

    rss: int = 0
    num_unread: int = 0
    generated_at: float = 0.0
    gone_at: float = 0.0
    num_closed: int = 0
    _has_begun: bool = False

    def record(self, num_open: float, num_slow: float) -> None:
        """The gateway's metrics now: requests that run, and clients that it has disconnected."""
        self._has_begun = self._has_begun or num_open > 0
        if num_open or not self._has_begun:
            self.generated_at = time.monotonic()
        elif not self.num_unread:
            self.num_unread = NUM_CONNECTIONS - int(num_slow)


async def _watched(url: str, gateway: psutil.Process, ended: asyncio.Task[int]) -> Seen:
    """Returns when all clients are gone."""
    seen, next_at = Seen(), 0.0
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        while not ended.done():
            seen.rss = max(seen.rss, gateway.memory_info().rss)
            now = time.monotonic()
            if now >= next_at:
                next_at = now + METRICS_S
                text = (await client.get(f"{url}/metrics")).text
                seen.record(_value(text, OPEN_STREAMS), _value(text, SLOW_CLIENTS))
                print(round(now, 1), seen, flush=True)
            await asyncio.wait([ended], timeout=SAMPLE_S)
    seen.gone_at, seen.num_closed = time.monotonic(), ended.result()
    return seen


def _value(metrics: str, name: str) -> float:
    lines = (line for line in metrics.splitlines() if line.startswith(name))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def _output(clients: asyncio.subprocess.Process) -> int:
    assert clients.stdout is not None, "its output is a pipe"
    async with asyncio.timeout(2 * PATIENCE_S):
        return int(await clients.stdout.read() or 0)
