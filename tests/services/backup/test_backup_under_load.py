"""Backups and restores by the command, of a real Redis, while a real gateway serves."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import redis

from shared.backup.key_families import family_of
from shared.tenancy.tenant import GENERATION, TENANTS, digest_of
from tests.support.services.live_cluster import (
    MODEL,
    PREFIX,
    LiveCluster,
    live_cluster,
)
from tests.support.services.model_dir import write_model_dir
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET_TEXT = "the text of a tenant that switches zero retention on"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    model = write_model_dir(folder / "tiny")
    async with live_cluster(folder, model, has_tls=False, security="none") as found:
        yield found


class Commands:
    """The `hearth` command with one list of retractions."""

    def __init__(self, cluster: LiveCluster, folder: Path) -> None:
        self.list_file = folder / "retractions.jsonl"
        self.backup_file = folder / "hearth.backup"
        self._environ = {
            **os.environ,
            "HEARTH_REDIS_URL": cluster.redis_url,
            "HEARTH_RETRACTIONS": str(self.list_file),
            "XDG_STATE_HOME": str(folder),
            "COLUMNS": "200",
        }

    async def run(self, *arguments: str, status: int = 0) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services",
            *arguments,
            env=self._environ,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        assert process.returncode == status, errors.decode()
        return (errors if status else output).decode()

    async def restore(self, *options: str) -> dict[str, list[int]]:
        """Returns the numbers of each kind: in the backup, added, taken back."""
        output = await self.run("restore", str(self.backup_file), *options)
        rows = re.findall(r"^ *(\S.*?)\s+([\d,]+)\s+([\d,]+)\s+([\d,]+)\s*$", output, re.MULTILINE)
        return {kind: [int(each.replace(",", "")) for each in row] for kind, *row in rows}


@asynccontextmanager
async def load(cluster: LiveCluster) -> AsyncIterator[list[str]]:
    """Keeps two clients busy; gives the failures."""
    failures, is_over = list[str](), asyncio.Event()
    num_answers = 0

    async def ask(number: int) -> None:
        nonlocal num_answers
        while not is_over.is_set():
            try:
                await cluster.chat(f"question {number} of many", max_tokens=4)
                num_answers += 1
            except httpx.HTTPError as error:
                failures.append(str(error))

    clients = [asyncio.create_task(ask(number)) for number in range(2)]
    try:
        yield failures
        before = num_answers
        await until(lambda: num_answers > before + 4)
    finally:
        is_over.set()
        await asyncio.gather(*clients)


async def add_tenant(commands: Commands, name: str, *options: str) -> str:
    return (await commands.run("tenant", "add", name, *options)).strip()


async def store_text(cluster: LiveCluster, key: str, text: str) -> str:
    """Stores a response and a named prefix; returns the response's id."""
    headers = {"authorization": f"Bearer {key}"}
    body = {"model": MODEL, "input": text, "max_output_tokens": 8}
    response = await cluster.http.post("/v1/responses", json=body, headers=headers)
    response.raise_for_status()
    prefix = {"model": MODEL, "system": f"{PREFIX} {text}"}
    put = await cluster.http.put("/v1/prefixes/rules", json=prefix, headers=headers)
    put.raise_for_status()
    found: str = response.json()["id"]
    return found


async def status_of(cluster: LiveCluster, key: str, path: str = "/v1/models") -> int:
    headers = {"authorization": f"Bearer {key}"}
    return (await cluster.http.get(path, headers=headers)).status_code


async def content_of(client: redis.Redis) -> dict[str, Any]:
    """Returns what Redis holds, by key. Redis's link passes through this event loop."""
    return await asyncio.to_thread(read_all, client)


def read_all(client: redis.Redis) -> dict[str, Any]:
    readers: dict[bytes, Any] = {
        b"string": client.get,
        b"hash": client.hgetall,
        b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        b"stream": client.xrange,
    }
    return {
        key.decode(): readers[client.type(key)](key) for key in sorted(client.scan_iter(count=1000))
    }


@pytest.mark.long
async def test_a_restore_under_load_brings_back_all_but_what_was_taken_back(
    cluster: LiveCluster, tmp_path: Path
) -> None:
    commands = Commands(cluster, tmp_path)
    admin = redis.Redis.from_url(cluster.redis_url)
    limits = ("--requests-per-min", "600", "--concurrency", "16", "--allowed-models", MODEL)
    keys = {
        "kept": await add_tenant(commands, "kept", *limits),
        "gone": await add_tenant(commands, "gone"),
        "quiet": await add_tenant(commands, "quiet"),
    }
    keys["leaked"] = (await commands.run("api-key", "kept")).strip()
    await commands.run("model", "alias", "assistant", MODEL)
    await commands.run("model", "alias", "own", MODEL, "--tenant", "kept")
    responses = {
        name: await store_text(cluster, keys[name], f"{SECRET_TEXT} {name}")
        for name in ("kept", "gone", "quiet")
    }
    async with load(cluster) as failures:
        await until(partial(has_usage, admin))
        before = await content_of(admin)
        assert [key for key in before if family_of(key) is None] == []
        await commands.run("backup", str(commands.backup_file))
        assert commands.backup_file.stat().st_mode & 0o777 == 0o600

        await commands.run("tenant", "revoke", "kept", "--key", digest_of(keys["leaked"])[:12])
        await commands.run("tenant", "remove", "gone")
        await commands.run("tenant", "limits", "quiet", "--zero-retention")

        await asyncio.to_thread(admin.flushall)
        dry = await commands.restore("--dry-run")
        assert not {TENANTS, GENERATION} & {*await content_of(admin)}
        wet = await commands.restore()
        assert wet == dry
        assert (wet["tenants"], wet["keys"]) == ([4, 3, 1], [5, 4, 2])
        assert (wet["stored responses"], wet["named prefixes"]) == ([3, 1, 2], [3, 1, 2])
        assert wet["orders to drop KV"] == [0, 2, 0]
    assert failures == []

    expected = {"kept": 200, "quiet": 200, "leaked": 401, "gone": 401}
    assert {name: await status_of(cluster, keys[name]) for name in expected} == expected
    for path in (f"/v1/responses/{responses['kept']}", "/v1/prefixes/rules"):
        assert await status_of(cluster, keys["kept"], path) == 200
    after = await content_of(admin)
    assert [key for key in after if re.match("hearth:(quiet|gone):(response|pinned)", key)] == []
    check_restored(before, after)
    again = await commands.restore()
    assert {kind: row[1] for kind, row in again.items() if row[1]} == {}
    admin.close()


async def has_usage(client: redis.Redis) -> bool:
    return any(":usage:" in key for key in await content_of(client))


def check_restored(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Every key that a backup keeps has its content of the time of the backup."""
    taken_back = re.compile(r"hearth:(gone:|quiet:(response|pinned)|kv_drops|retractions)")
    for key, content in before.items():
        family = family_of(key)
        assert family is not None
        if family.treatment != "kept" or taken_back.match(key):
            continue
        match key.split(":"):
            case ["hearth", "tenants"]:
                assert content.keys() - after[key].keys() == {b"gone"}
                changed = [name for name, record in after[key].items() if record != content[name]]
                assert changed == [b"quiet"]
                assert b'"is_zero_retention":true' in after[key][b"quiet"]
            case ["hearth", "api_key", _]:
                if content[b"tenant_id"] != b"gone":
                    assert content.items() <= after[key].items()
            case ["hearth", _, "usage", *_]:  # goes on
                assert all(int(after[key][name]) >= int(sum_) for name, sum_ in content.items())
            case ["hearth", "audit", *_]:
                assert [line for line in content if line not in after[key]] == []
            case _:
                assert after[key] == content, key
