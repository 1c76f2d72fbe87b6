"""R1: Redis is killed. What three tenants have afterwards, of keys, records, limits and usage.

Of `hearth up`: its Redis keeps an append-only file, the supervisor starts it again, and all is as
before. One of the keys has never been used, so only Redis knows it.

With an external Redis without persistence, which returns empty: the gateways answer the keys that
they know, with the limits that they know. The key that they do not know gets 503 and not 401: it
may be valid. What only Redis had is gone: usage until then, and what the tenants had used of the
current minute's limits. Once the operator adds the tenants again, all keys are answered.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import urllib.error
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Bar, at_least, at_most
from services.local.state import LocalClusterState
from tests.support.servers import RedisServer
from tests.support.services.running import (
    NoModel,
    add_tenants,
    complete,
    eventually,
    processes_of,
    records_of,
    up,
)

TENANTS = {
    "acme": {"requests_per_min": 50},
    "globex": {"concurrency": 9, "output_tokens_per_min": 10_000},
    "initech": {"input_tokens_per_min": 10_000},
}
KEYS = {name: f"key-of-{name}" for name in TENANTS}
*KNOWN, UNKNOWN = KEYS.values()  # the gateways know KNOWN by a request before the loss
REDIS = "redis-server"


async def measure(rows: Sequence[str]) -> list[Bar]:
    assert "R1" in rows
    kept = await asyncio.to_thread(killed_of_up)
    return [*kept, *await asyncio.to_thread(emptied)]


def killed_of_up() -> list[Bar]:
    with (
        tempfile.TemporaryDirectory(prefix="hearth-redis-") as name,
        up(Path(name), "--role", "both") as state,
    ):
        before = start_using(state)
        (pid,) = redis_pids(Path(name))
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: redis_pids(Path(name)) - {pid}, "new redis-server")
        eventually(lambda: status_of(state, state.api_key) == 200, "answer")
        after = asyncio.run(records_of(state.redis_url, list(TENANTS)))
        num_answered = sum(status_of(state, key) == 200 for key in KEYS.values())
    num_records = sum(a == b for a, b in zip(before[0], after[0], strict=True))
    num_usages = sum(usage in after[1] for usage in before[1])
    return [
        at_least("R1: keys answered after a kill, hearth up", num_answered, len(KEYS), "of 3"),
        at_least("R1: tenants with equal limits after it", num_records, len(TENANTS), "of 3"),
        at_least("R1: usage kept after it", num_usages, len(before[1]), f"of {len(before[1])}"),
    ]


def emptied() -> list[Bar]:
    redis = RedisServer()
    with tempfile.TemporaryDirectory(prefix="hearth-redis-") as name:
        try:
            with up(Path(name), "--role", "both", "--redis", redis.url) as state:
                start_using(state)
                redis.stop()
                away = Counter(status_of(state, key) for key in KNOWN)
                redis.start()
                empty = Counter(status_of(state, key) for key in KNOWN)
                unknown = status_of(state, UNKNOWN)
                asyncio.run(add_tenants(redis.url, TENANTS, KEYS))
                eventually(lambda: status_of(state, UNKNOWN) == 200, "answer for the unknown key")
                restored = Counter(status_of(state, key) for key in KEYS.values())
        finally:
            redis.stop()
    known = "of 2"
    return [
        at_least("R1: known keys answered while an external Redis is away", away[200], 2, known),
        at_least("R1: known keys answered while it is back and empty", empty[200], 2, known),
        at_most(f"R1: keys refused as invalid then ({unknown})", unknown == 401, 0, "of 3"),
        at_least("R1: keys answered once the tenants are added again", restored[200], 3, "of 3"),
    ]


def start_using(state: LocalClusterState) -> tuple[list[object], list[object]]:
    """Adds the tenants, and uses all keys but the last. Returns their records, and their usage."""
    asyncio.run(add_tenants(state.redis_url, TENANTS, KEYS))
    for key in KNOWN:
        complete(state.url, key)
    names = list(TENANTS)

    def are_counted() -> object:
        records, usage = asyncio.run(records_of(state.redis_url, names))
        counted = {each.tenant_id for each in usage if each.requests}
        return (records, usage) if len(counted) == len(KNOWN) else None

    found = eventually(are_counted, "usage of the requests")
    assert isinstance(found, tuple)
    return found


def status_of(state: LocalClusterState, key: str) -> int:
    """Returns the HTTP status of a chat with this key; 0 if there is no response."""
    try:
        complete(state.url, key)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, NoModel):
        return 0
    return 200


def redis_pids(state_home: Path) -> set[int]:
    programs = {pid: line.split("\0")[0] for pid, line in processes_of(state_home).items()}
    return {pid for pid, path in programs.items() if Path(path.split(" ")[0]).name == REDIS}
