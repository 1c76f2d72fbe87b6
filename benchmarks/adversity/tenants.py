"""F1–F5: one tenant sends what is expensive, another is the victim.

The victim is one client with small chats. It is measured alone and beside the attacker by turns, so
each bar is a ratio of one run. The gateway's main process has a core of its own; attackers,
preparation processes and all others share another (`cores.py`). Attackers have no limits. A step of
the workers takes 10 ms and no CPU. On a machine with other load, p99 alone is several times p50 and
the ratios say little.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from redis.asyncio import Redis

from benchmarks.adversity.attacker import Client
from benchmarks.adversity.attacks import NUM_PREFIXES, rejected
from benchmarks.adversity.cores import pinned
from benchmarks.adversity.turns import Victim, attacker, by_turns, watched
from benchmarks.report import Bar, at_least, at_most
from benchmarks.serving.closed_loop import Target
from benchmarks.serving.hearth import SPLIT, hearth
from benchmarks.stop_strings import measure as measure_stop_strings
from shared.clock import MonotonicClock
from shared.store import RedisStore
from shared.tenancy.pinned_prefix import MAX_PER_TENANT
from shared.tenancy.tenant_admin import TenantAdmin, new_api_key
from tests.support.servers import RedisServer

STEP_S = 0.01  # as on a GPU, so that 128 choices are 12,800 tokens/s
TURN_S = 2.0
NUM_TURNS = 6
MIB = 1 << 20
MAX_GAP_MS = 50.0
MAX_TOKEN_US = 2.0
MAX_PREFIX_MIB = 64
GAP_TURN_S = 5.0
NUM_STEERED = 100_000  # tokens


@dataclass
class Run:
    target: Target
    admin: TenantAdmin
    redis: Redis
    victim: Victim
    gateway: psutil.Process

    async def new_key(self, tenant_id: str, **limits: int) -> str:
        api_key = new_api_key()
        await self.admin.add(tenant_id, limits, api_key)
        return api_key

    async def beside(self, row: str, kind: str, name: str, **options: int) -> list[Bar]:
        """The victim's bars beside attacks of this kind, from a new tenant."""
        api_key = await self.new_key(f"{row}-{kind}")
        async with attacker(kind, self.target.url, api_key, **options) as attack:
            waits = await by_turns(self.victim, attack, num_turns=NUM_TURNS, turn_s=TURN_S)
        statuses = dict(sorted(attack.statuses.items()))
        print(f"{row} {kind}: {waits.summary()}; attacker's responses {statuses}", flush=True)
        return waits.bars(row, name)


async def measure(rows: Sequence[str]) -> list[Bar]:
    measured = {
        "F1": large_chats,
        "F2": nested_bodies,
        "F3": renderer_and_stop_strings,
        "F4": prefix_writes,
        "F5": rejected_requests,
    }
    bars: list[Bar] = []
    redis = RedisServer()
    with tempfile.TemporaryDirectory() as folder:
        cluster = hearth(SPLIT, Path(folder), step_s=STEP_S, redis=redis)
        async with cluster as (target, processes), pinned(processes):
            store = RedisStore(redis.url, MonotonicClock(), timeout_s=2.0)
            connection, victim = Redis.from_url(redis.url), Victim(target)
            admin = TenantAdmin(store, time.time)
            run = Run(target, admin, connection, victim, processes["gateway"])
            try:
                await victim.turn(2.0)
                for row in rows:
                    bars += await measured[row](run)
            finally:
                victim.close()
                await store.close()
                await connection.aclose()
    return bars


async def large_chats(run: Run) -> list[Bar]:
    return await run.beside("F1", "chats", "chats of 8 MiB and at the bound")


async def nested_bodies(run: Run) -> list[Bar]:
    bars = await run.beside("F2", "nested", "deep and wide JSON")
    gap_ms = await longest_gap_ms(run, "nested")
    return [*bars, at_most("F2: longest gap of the event loop, CPU", gap_ms, MAX_GAP_MS, "ms")]


async def renderer_and_stop_strings(run: Run) -> list[Bar]:
    steered = measure_stop_strings("costly", NUM_STEERED, token_chars=1)["us a token"]
    return [
        *await run.beside("F3", "marks", "tools that break a renderer"),
        *await run.beside("F3", "stops", "128 choices with stop strings", num_connections=1),
        at_most("F3: CPU of stop strings for a token", steered, MAX_TOKEN_US, "us"),
    ]


async def prefix_writes(run: Run) -> list[Bar]:
    """A burst of more prefixes than a tenant may have, at once; then the victim's bars."""
    tenant_id = "F4-burst"
    api_key = await run.new_key(tenant_id)
    url = run.target.url
    async with attacker("prefixes", url, api_key, num_connections=NUM_PREFIXES) as attack:
        await attack.turn(0)
    entries = await run.redis.hlen(f"hearth:{tenant_id}:pinned_prefixes")
    bars = await run.beside("F4", "prefixes", "prefix writes")
    used = max([await used_mib(run.redis, each) for each in (tenant_id, "F4-prefixes")])
    return [
        *bars,
        at_most("F4: Redis memory of a tenant's prefixes", used, MAX_PREFIX_MIB, "MiB"),
        at_least("F4: prefixes after 120 writes at once", entries, MAX_PER_TENANT, "prefixes"),
        at_most("F4: prefixes beyond the limit", entries - MAX_PER_TENANT, 0, "prefixes"),
    ]


async def rejected_requests(run: Run) -> list[Bar]:
    """One request after the other, so that none is rejected for the number of open ones.

    The meter only drains between requests: if it is higher after a request, that was charged.
    """
    attacks = rejected()
    api_key = await run.new_key(tenant_id := "F5", requests_per_min=len(attacks))
    tenant = await run.admin.one(tenant_id)
    client, host = Client(run.target.url), urlsplit(run.target.url).netloc
    num_rejected, num_charged, level = 0, 0, 0.0
    for attack in attacks:
        status = await client.send(attack.message(host, api_key))
        used = (await run.admin.state(tenant)).used["requests_per_min"]
        num_rejected += status.startswith("4")
        num_charged += used > level
        level = used
    client.close()
    return [
        at_least("F5: rejected requests that were charged", num_charged, num_rejected, "requests"),
        at_least("F5: attacks that were rejected", num_rejected, len(attacks), "requests"),
    ]


async def longest_gap_ms(run: Run, kind: str) -> float:
    api_key = await run.new_key(f"gap-{kind}")
    async with attacker(kind, run.target.url, api_key) as attack:
        await attack.turn(1.0)
        gap_ms, _ = await watched(run.target.url, run.gateway, attack.turn(GAP_TURN_S))
    return gap_ms


async def used_mib(redis: Redis, tenant_id: str) -> float:
    total = 0
    async for key in redis.scan_iter(f"hearth:{tenant_id}:p*"):
        total += await redis.memory_usage(key, samples=0) or 0
    return total / MIB
