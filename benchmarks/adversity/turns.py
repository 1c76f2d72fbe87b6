"""A victim beside an attacker and alone, or beside a smaller attacker, by turns."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
from redis.asyncio import Redis

from benchmarks.adversity.attacker import read_response
from benchmarks.adversity.cores import pinned
from benchmarks.report import Bar, at_most
from benchmarks.serving.closed_loop import Target
from benchmarks.serving.cluster import SPLIT, hearth
from services.client.http_client import ConnectionPool, http_request
from services.client.load_test import percentile
from shared.clock import MonotonicClock
from shared.store import RedisStore
from shared.tenancy.tenant_admin import TenantAdmin, new_api_key
from tests.support.cluster.service_processes import ROOT
from tests.support.servers import RedisServer

NUM_TOKENS = 4
MAX_RATIO = 1.5
STEP_S = 0.01
NUM_TURNS, TURN_S = 6, 2.0
PROBE = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
PATIENCE_S = 60.0  # timeout for the end of an attacker's turn


@dataclass
class Run:
    """A cluster whose gateway has a core of its own, and keys of new tenants."""

    target: Target
    gateway: psutil.Process
    victim: Victim
    redis: Redis
    store: RedisStore

    @property
    def admin(self) -> TenantAdmin:
        return TenantAdmin(self.store, time.time)

    async def new_key(self, tenant_id: str, **limits: int) -> str:
        api_key = new_api_key()
        await self.admin.add(tenant_id, limits, api_key)
        return api_key

    async def beside(self, row: str, kind: str, name: str, **options: int) -> list[Bar]:
        """Returns the victim's bars beside attacks of this kind, from a new tenant."""
        api_key = await self.new_key(f"{row}-{kind}")
        async with attacker(kind, self.target.url, api_key, **options) as attack:
            waits = await by_turns(self.victim, attack, num_turns=NUM_TURNS, turn_s=TURN_S)
        statuses = dict(sorted(attack.statuses.items()))
        print(f"{row} {kind}: {waits.summary()}; attacker's responses {statuses}", flush=True)
        return waits.bars(row, name)


@asynccontextmanager
async def started(commands: Mapping[str, Sequence[str]] | None = None) -> AsyncIterator[Run]:
    """Runs a cluster that has served its first requests.

    A step takes 10 ms, as on a GPU, so that 128 choices are 12,800 tokens/s.
    """
    redis = RedisServer()
    with tempfile.TemporaryDirectory() as folder:
        cluster = hearth(SPLIT, Path(folder), step_s=STEP_S, redis=redis, commands=commands)
        async with cluster as (target, processes), pinned(processes):
            store = RedisStore(redis.url, MonotonicClock(), timeout_s=2.0)
            connection, victim = Redis.from_url(redis.url), Victim(target)
            try:
                await victim.turn(2.0)
                victim.close()  # opened again by its next turn
                yield Run(target, processes["gateway"], victim, connection, store)
            finally:
                victim.close()
                await store.close()
                await connection.aclose()


class Attacker:
    """A process of `benchmarks.adversity.attacker`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.statuses: Counter[str] = Counter()

    async def turn(self, seconds: float) -> None:
        """Returns when every response of the turn has ended. Raises RuntimeError."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{seconds}\n".encode())
        async with asyncio.timeout(seconds + PATIENCE_S):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the attacker's process has ended")
        self.statuses.update(msgspec.json.decode(line, type=dict[str, int]))


@asynccontextmanager
async def attacker(
    kind: str, url: str, api_key: str, *, num_connections: int | None = None
) -> AsyncIterator[Attacker]:
    """Inherits the cores of this process."""
    more = () if num_connections is None else (str(num_connections),)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.adversity.attacker",
        kind,
        url,
        api_key,
        *more,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        yield Attacker(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@dataclass
class Waits:
    """The victim's TTFTs in seconds, and the requests that got no complete response."""

    alone_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return percentile(self.beside_s, 99) / percentile(self.alone_s, 99)

    def summary(self) -> str:
        """Returns the number, p50 and p99 of the victim's TTFTs."""
        pairs = (("alone", self.alone_s), ("beside", self.beside_s))
        return ", ".join(
            f"{name} {len(ttft_s)} requests {statistics.median(ttft_s) * 1e3:.1f} ms "
            f"(p99 {percentile(ttft_s, 99) * 1e3:.1f})"
            for name, ttft_s in pairs
        )

    def bars(self, row: str, attack: str) -> list[Bar]:
        return [
            at_most(
                f"{row}: victim's p99 TTFT beside {attack}, to alone", self.ratio, MAX_RATIO, "x"
            ),
            at_most(
                f"{row}: victim's requests rejected beside {attack}",
                len(self.rejected),
                0,
                "requests",
            ),
        ]


class Victim:
    """One client that sends its next small chat when the response to the last one has ended."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._connections = ConnectionPool(target.url)
        self._numbers = itertools.count()

    async def turn(self, seconds: float) -> tuple[list[float], list[str]]:
        """Returns the TTFTs in seconds, and the errors of requests that failed."""
        loop = asyncio.get_running_loop()
        until, ttft_s, errors = loop.time() + seconds, [], []
        while loop.time() < until:
            sample = await self._connections.request(self._message())
            if sample.error:
                errors.append(sample.error)
            else:
                ttft_s.append(sample.ttft_s)
        return ttft_s, errors

    def close(self) -> None:
        self._connections.close()

    def _message(self) -> bytes:
        body = {
            "model": self._target.model,
            "messages": [{"role": "user", "content": f"Is {next(self._numbers)} a prime?"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
        }
        return http_request(self._target.url, self._target.api_key, "/v1/chat/completions", body)


async def by_turns(
    victim: Victim,
    attack: Attacker,
    *,
    num_turns: int,
    turn_s: float,
    warm_up_s: float = 1.0,
    smaller: Attacker | None = None,
) -> Waits:
    """Measures by turns. A turn alone, or beside the `smaller` attack, begins when the last turn's
    attack has been answered.
    """
    await asyncio.gather(victim.turn(warm_up_s), attack.turn(warm_up_s))
    waits = Waits()
    for _ in range(num_turns):
        others = [] if smaller is None else [smaller.turn(turn_s)]
        (alone_s, errors), *_ = await asyncio.gather(victim.turn(turn_s), *others)
        waits.alone_s += alone_s
        waits.rejected += errors
        (beside_s, errors), _ = await asyncio.gather(victim.turn(turn_s), attack.turn(turn_s))
        waits.beside_s += beside_s
        waits.rejected += errors
    return waits


async def watched(
    url: str, gateway: psutil.Process, attack: Coroutine[Any, Any, Any], *, pause_s: float = 0.0
) -> tuple[float, int]:
    """Returns the longest gap of the gateway's event loop in milliseconds, and its largest RSS in
    bytes, until `attack` has ended. `pause_s` is the time between two requests.

    A gap is the CPU time, which others on the machine do not change, between a small request and
    its response: that waits for the loop's iteration that is under way, and for its own.
    """
    parts = urlsplit(url)
    attacking = asyncio.create_task(attack)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    longest_s, rss = 0.0, 0
    while not attacking.done():
        before = cpu_s(gateway.pid)
        writer.write(PROBE)
        await read_response(reader)
        longest_s = max(longest_s, cpu_s(gateway.pid) - before)
        rss = max(rss, gateway.memory_info().rss)
        await asyncio.sleep(pause_s)
    await attacking
    writer.close()
    return longest_s * 1e3, rss


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds of a process, to the nanosecond (`clock_getcpuclockid`)."""
    return time.clock_gettime((~pid << 3) | 2)
