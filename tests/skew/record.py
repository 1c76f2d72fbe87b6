"""Records what the previous release writes, for tests of what this one reads.

`python -m tests.skew.record` writes tests/skew/recorded/: samples of all messages and of records
of the KV data plane, the types that the release reads, and what Redis holds after commands of an
operator and a request of each dialect.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import redis.asyncio

from services.client.hearth_nats import HearthClient
from tests.skew.dialects import all_requests
from tests.skew.fleet import RollingFleet, environ_of
from tests.skew.releases import Release, previous_commit, release_of
from tests.skew.streams import Streams
from tests.support.cluster.service_processes import DEMO_MODEL_NAME

RECORDED = Path(__file__).parent / "recorded"
SAMPLES = Path(__file__).parent / "samples.py"
SURFACE = ("messages.txt", "redis.txt")
FLEET = ("kv_index-1", "scheduler-1", "decode-1", "gateway-1", "gateway-2")
TENANT = "team-a"
# Of an operator, as words of `hearth`.
COMMANDS = (
    f"tenant add {TENANT} --requests-per-min 600 --concurrency 16 --priority 2",
    "tenant add team-eu --allowed-regions eu --zero-retention",
    f"model alias assistant {DEMO_MODEL_NAME}",
)
NUM_PREFIXES = 2
LIFE_S = 20 * 365 * 86400.0  # of stored responses


def main() -> None:
    release = release_of(previous_commit())
    RECORDED.mkdir(exist_ok=True)
    environ = environ_of(release, {})
    samples = subprocess.run(
        [sys.executable, SAMPLES], cwd=release.root, env=environ, check=True, capture_output=True
    )
    (RECORDED / "samples.json").write_bytes(samples.stdout + b"\n")
    for name in SURFACE:
        text = (release.root / "tests/surface/records" / name).read_text()
        (RECORDED / name).write_text(text)
    with tempfile.TemporaryDirectory() as folder:
        contents = asyncio.run(_written(Path(folder), release))
    lines = json.dumps(contents, indent=0, sort_keys=True, ensure_ascii=False)
    (RECORDED / "redis.json").write_text(lines + "\n")
    print(f"{release.name}: {len(contents['keys'])} keys")


async def _written(folder: Path, release: Release) -> dict[str, Any]:
    """Returns the keys of Redis, and what the answers were that it holds."""
    fleet = RollingFleet(folder, release, FLEET, step_s=0.002, response_ttl_s=LIFE_S)
    try:
        await fleet.start()
        for each in COMMANDS:
            fleet.run_command(release, *each.split())
        nats = await HearthClient.connect(fleet.client_url)
        first = {each.name: each for each in all_requests() if each.name != "grammar"}
        streams = Streams(fleet, nats, requests=[*first.values()][:6])
        await streams.learn()
        await nats.close()
        await _pin(fleet)
        for name in ("gateway-1", "gateway-2"):  # write what they still hold
            fleet.terminate(name)
            await fleet.ended(name, 60)
        keys = await _keys(fleet.redis_url)
    finally:
        fleet.stop()
    return {"api_key": fleet.api_key, "responses": streams.stored, "keys": keys}


async def _pin(fleet: RollingFleet) -> None:
    body = {"model": DEMO_MODEL_NAME, "system": "You answer questions about Hearth. " * 8}
    headers = {"Authorization": f"Bearer {fleet.api_key}"}
    url = next(iter(fleet.urls.values()))
    async with httpx.AsyncClient(headers=headers, timeout=30, trust_env=False) as client:
        (await client.put(f"{url}/v1/prefixes/greeting", json=body)).raise_for_status()


async def _keys(url: str) -> dict[str, list[Any]]:
    """Returns type and value of each key; bytes as text of Latin-1."""
    client = redis.asyncio.Redis.from_url(url, decode_responses=True, encoding="latin-1")
    try:
        keys = sorted(await client.keys("*"))
        prefixes = [key for key in keys if ":prefix:" in key]  # of the index: as many as blocks
        kept = [key for key in keys if key not in prefixes[NUM_PREFIXES:]]
        return {key: await _value(client, key) for key in kept}
    finally:
        await client.aclose()


async def _value(client: Any, key: str) -> list[Any]:
    kind = await client.type(key)
    read = {
        "string": lambda: client.get(key),
        "hash": lambda: client.hgetall(key),
        "list": lambda: client.lrange(key, 0, -1),
        "set": lambda: client.smembers(key),
        "zset": lambda: client.zrange(key, 0, -1, withscores=True),
        "stream": lambda: client.xrange(key),
    }[kind]
    value = await read()
    return [kind, sorted(value) if kind == "set" else value]


if __name__ == "__main__":
    main()
