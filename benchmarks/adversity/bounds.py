"""C1–C6: what one tenant, or a caller without a key, may take of a gateway.

| row | attack | bar |
| --- | --- | --- |
| C1 | one key opens all connections, at 1,024 descriptors | new ones and probes are served |
| C2 | 1,000 streams of one tenant at once | none refused; the victim's TTFT |
| C3 | small bodies that refer to megabytes of stored responses | memory and gaps of the loop |
| C4 | calls without a key | CPU time of each |
| C5 | bodies of many messages, whose clients leave | gaps of the loop |
| C6 | 1,000 streams of one tenant, of `hearth up` with the demo model | the victim's TTFT |

CPU times are those of the gateway's main process, which other processes do not change.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.adversity.attacks import NUM_STREAMS, messages, stored_records
from benchmarks.adversity.turns import (
    Run,
    Victim,
    Waits,
    attacker,
    by_turns,
    cpu_s,
    started,
    watched,
)
from benchmarks.report import Bar, at_least, at_most
from benchmarks.serving.closed_loop import Target
from services.cli.cluster.service_options import DEMO_MODEL_DIR, DEMO_MODEL_NAME
from services.client.load_test import percentile
from services.gateway.dialects.responses.storage.store import ResponseStore
from shared.clock import MonotonicClock
from shared.tenancy.tenant import TenantRecord
from shared.tenancy.tenant_admin import new_api_key
from tests.support.services.running import add_tenants, up

NUM_DESCRIPTORS = 1024
NUM_HELD = 1200  # connections that the holder tries to keep
NUM_NEW = 8
TURN_S = 5.0
NUM_LEAVERS = 4
LEFT_AFTER_S = 0.03
MAX_RATIO = 1.5
MAX_CROWD_RATIO = 2.0
NUM_FEW = 64
NUM_TURNS = 6  # of C6: a p99 of fewer than a hundred requests is the slowest of them
NUM_CROWDS, ALONE_S = 5, 2.0  # times that all streams come at once, and the time before each
MAX_GAP_MS = 50.0
MAX_RSS_MIB = 64
MAX_CALL_MS = 1.0
NUM_CALLS = 100
MIB = 1 << 20
UNDOCUMENTED = ("/openapi.json", "/docs", "/", "/none", "/page/app.js")
BODY = b'{"model":"m","input":"' + b"a" * 1000 + b'"}'
_LIMITED = (
    "import resource, runpy, sys; "
    f"resource.setrlimit(resource.RLIMIT_NOFILE, ({NUM_DESCRIPTORS}, {NUM_DESCRIPTORS})); "
    "runpy.run_module('services', run_name='__main__', alter_sys=True)"
)
_GATEWAY = ["gateway", "--model-dir", str(DEMO_MODEL_DIR), "--model-name", DEMO_MODEL_NAME]


async def measure(rows: Sequence[str]) -> list[Bar]:
    measured = {"C2": streams, "C3": stored_state, "C4": anonymous_calls, "C5": leavers}
    bars: list[Bar] = await streams_of_model() if "C6" in rows else []
    if "C1" in rows:
        async with started({"gateway": ["-c", _LIMITED, *_GATEWAY]}) as run:
            bars += await connections(run)
    if set(rows) - {"C1", "C6"}:
        async with started() as run:
            for row in (each for each in measured if each in rows):
                bars += await measured[row](run)
    return bars


async def connections(run: Run) -> list[Bar]:
    """Measures a victim once the holder's connections have each had a free request."""
    holder = await run.new_key("C1")
    parts = urlsplit(run.target.url)
    head = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {holder}\r\n\r\n"
    held = []
    for _ in range(NUM_HELD):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(head.encode())
        await reader.readuntil(b"\r\n\r\n")
        held.append(writer)
    answered = Counter[str]()
    for _ in range(NUM_NEW):
        victim = Victim(run.target)
        ttft_s, _ = await victim.turn(0.001)
        answered["victim"] += bool(ttft_s)
        victim.close()
        for path in ("/health", "/ready"):
            async with httpx.AsyncClient(timeout=5, trust_env=False) as http:
                answered["probes"] += (await http.get(run.target.url + path)).status_code == 200
    for writer in held:
        writer.close()
    return [
        at_least("C1: victim's new connections served", answered["victim"], NUM_NEW, ""),
        at_least("C1: probes answered", answered["probes"], 2 * NUM_NEW, ""),
    ]


async def streams(run: Run) -> list[Bar]:
    """Measures a victim beside five crowds, and the gateway's own share of its wait beside a sixth.

    All other processes, both clients among them, share one core: with two cores the victim's TTFT
    is mostly theirs.
    """
    api_key, victim, waits = await run.new_key("C2"), Victim(run.target), Waits()
    async with attacker("streams", run.target.url, api_key, num_connections=NUM_STREAMS) as attack:
        for _ in range(NUM_CROWDS):
            alone_s, errors = await victim.turn(ALONE_S)
            waits.alone_s += alone_s
            waits.rejected += errors
            attacking = asyncio.create_task(attack.turn(0))
            while not attacking.done():
                beside_s, errors = await victim.turn(0.001)
                waits.beside_s += beside_s
                waits.rejected += errors
            await attacking
        gap_ms, _ = await _watched(run, attack.turn(0))
    victim.close()
    print(f"C2: {dict(attack.statuses)}; victim {waits.summary()}", flush=True)
    served = attack.statuses["200"] / (NUM_CROWDS + 1)
    return [
        at_least("C2: streams of one tenant served at once", served, NUM_STREAMS, ""),
        at_most("C2: longest gap of the event loop, CPU", gap_ms, MAX_GAP_MS, "ms"),
        at_most("C2: victim's p99 TTFT, to alone", waits.ratio, MAX_RATIO, "x"),
        at_most("C2: victim's requests rejected", len(waits.rejected), 0, "requests"),
    ]


async def streams_of_model() -> list[Bar]:
    """Measures a victim beside 64 and beside 1,000 streams, by turns. Processes share their
    cores.
    """
    keys = {name: new_api_key() for name in ("C6", "C6-few", "C6-victim")}
    with tempfile.TemporaryDirectory() as folder, up(Path(folder), "--role", "apart") as state:
        await add_tenants(state.redis_url, {name: {} for name in keys}, keys)
        victim = Victim(Target(state.url, keys["C6-victim"], DEMO_MODEL_NAME))
        few = attacker("streams", state.url, keys["C6-few"], num_connections=NUM_FEW)
        many = attacker("streams", state.url, keys["C6"], num_connections=NUM_STREAMS)
        async with few as smaller, many as attack:
            waits = await by_turns(
                victim, attack, num_turns=NUM_TURNS, turn_s=TURN_S, smaller=smaller
            )
        victim.close()
    print(f"C6: {dict(attack.statuses)}; victim {waits.summary()}", flush=True)
    others = attack.statuses.total() - attack.statuses["200"]
    return [
        at_most("C6: streams of one tenant that were not served", others, 0, ""),
        at_most("C6: victim's p99 TTFT, to beside 64 streams", waits.ratio, MAX_CROWD_RATIO, "x"),
        at_most("C6: victim's requests rejected", len(waits.rejected), 0, "requests"),
    ]


async def stored_state(run: Run) -> list[Bar]:
    api_key = await run.new_key("C3")
    store = ResponseStore(
        run.store,
        MonotonicClock(),
        region="",
        now=time.time,
        count=lambda _: None,
        max_all_bytes=lambda: 1 << 30,
    )
    for record in stored_records():
        store.save(TenantRecord(tenant_id="C3"), record)
    await store.stop()
    idle = run.gateway.memory_info().rss
    async with attacker("continued", run.target.url, api_key, num_connections=24) as attack:
        gap_ms, rss = await _watched(run, attack.turn(TURN_S))
    print(f"C3: {dict(attack.statuses)}", flush=True)
    return [
        at_most("C3: gateway's RSS above idle", (rss - idle) / MIB, MAX_RSS_MIB, "MiB"),
        at_most("C3: longest gap of the event loop, CPU", gap_ms, MAX_GAP_MS, "ms"),
    ]


async def anonymous_calls(run: Run) -> list[Bar]:
    """Returns the dearest of the routes; of `/metrics`, which has a thread, the CPU time of
    both. Calls that are no GET have a body of 1 KiB.
    """
    async with httpx.AsyncClient(timeout=30, trust_env=False, base_url=run.target.url) as http:
        document = (await http.get("/openapi.json")).json()
        calls = [("get", path) for path in UNDOCUMENTED]
        calls += [
            (method, re.sub(r"{[^}]*}", "a", path))
            for path, methods in document["paths"].items()
            for method in methods
        ]
        costs_ms = {
            f"{method} {path}": await _cost_ms(run, http, method, path) for method, path in calls
        }
    print(f"C4: { ({call: round(cost, 2) for call, cost in costs_ms.items()}) } ms", flush=True)
    return [at_most("C4: CPU of a call without a key", max(costs_ms.values()), MAX_CALL_MS, "ms")]


async def _cost_ms(run: Run, http: httpx.AsyncClient, method: str, path: str) -> float:
    headers = {"content-type": "application/json"}
    request = http.build_request(
        method, path, content=None if method == "get" else BODY, headers=headers
    )
    for _ in range(2):
        await http.send(request)
    before = cpu_s(run.gateway.pid)
    for _ in range(NUM_CALLS):
        await http.send(request)
    return (cpu_s(run.gateway.pid) - before) / NUM_CALLS * 1e3


async def leavers(run: Run) -> list[Bar]:
    api_key = await run.new_key("C5")
    parts = urlsplit(run.target.url)
    message = messages()[0].message(parts.netloc, api_key)
    until = time.monotonic() + TURN_S

    async def leave() -> None:
        while time.monotonic() < until:
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(message)
            await asyncio.sleep(LEFT_AFTER_S)
            writer.transport.abort()

    async def attack() -> None:
        await asyncio.gather(*(leave() for _ in range(NUM_LEAVERS)))

    victim = Victim(run.target)
    watching = asyncio.create_task(_watched(run, attack()))
    ttft_s: list[float] = []
    while not watching.done():
        ttft_s += (await victim.turn(0.001))[0]
    gap_ms, _ = await watching
    victim.close()
    print(f"C5: {len(ttft_s)} of the victim, p99 {percentile(ttft_s, 99) * 1e3:.0f} ms", flush=True)
    return [
        at_most("C5: longest gap of the event loop, CPU", gap_ms, MAX_GAP_MS, "ms"),
    ]


async def _watched(run: Run, attack: Coroutine[Any, Any, Any]) -> tuple[float, int]:
    return await watched(run.target.url, run.gateway, attack, pause_s=0.002)
