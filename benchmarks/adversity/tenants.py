"""F1–F5: one tenant sends what is expensive, another is the victim.

The victim is one client with small chats. It is measured alone and beside the attacker by turns, so
each bar is a ratio of one run. The gateway's main process has a core of its own; attackers,
preparation processes and all others share another (`cores.py`). Attackers have no limits. A step of
the workers takes 10 ms and no CPU. On a machine with other load, p99 alone is several times p50 and
the ratios say little.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from redis.asyncio import Redis

from benchmarks.adversity.attacker import Client
from benchmarks.adversity.attacks import NUM_PREFIXES, rejected
from benchmarks.adversity.turns import Run, attacker, started, watched
from benchmarks.report import Bar, at_least, at_most
from benchmarks.stop_strings import measure as measure_stop_strings
from shared.tenancy.prefixes.pinned_prefix import MAX_PER_TENANT

MIB = 1 << 20
MAX_GAP_MS = 50.0
MAX_TOKEN_US = 2.0
MAX_PREFIX_MIB = 64
GAP_TURN_S = 5.0
NUM_STEERED = 100_000  # tokens


async def measure(rows: Sequence[str]) -> list[Bar]:
    measured = {
        "F1": large_chats,
        "F2": nested_bodies,
        "F3": renderer_and_stop_strings,
        "F4": prefix_writes,
        "F5": rejected_requests,
    }
    bars: list[Bar] = []
    async with started() as run:
        for row in rows:
            bars += await measured[row](run)
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
    """Sends a burst of more prefixes than a tenant may have, at once; returns the victim's bars."""
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
    """Sends one request after the other, so that none is rejected for the number of open ones.

    The meter only drains between requests: if it is higher after a request, that was charged.
    """
    attacks = rejected()
    api_key = await run.new_key(tenant_id := "F5", requests_per_min=len(attacks))
    tenant = await run.admin.one(tenant_id)
    client, host = Client(run.target.url), urlsplit(run.target.url).netloc
    num_rejected, num_charged, level = 0, 0, 0.0
    for attack in attacks:
        response = await client.send(attack.message(host, api_key))
        used = (await run.admin.state(tenant)).used["requests_per_min"]
        num_rejected += response.status.startswith("4")
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
