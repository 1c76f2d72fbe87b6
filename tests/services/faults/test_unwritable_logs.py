"""A cluster whose logs cannot be written: on a full disk, on a pipe that nobody reads, and on one
whose reader has gone. Workers and NATS die meanwhile; no process stops serving.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from services.cli.service_options import DEMO_MODEL_NAME
from tests.chaos.world.cluster import SERVICES, ChaosCluster
from tests.services.faults.unwritable_logs import full_disk, stopped_reader

DEADLINE_S = 60.0


class MutedCluster(ChaosCluster):
    """Logs of half of the processes are on a full disk, the others' are pipes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, step_s=0.002)
        self.readers: list[int] = []  # of the pipes
        for name in SERVICES:
            log = folder / f"{name}.log"
            if name.endswith("-1") and name != "kv_index-1":
                full_disk(log)
            else:
                self.readers.append(stopped_reader(log))

    async def chat(self, gateway: str) -> str:
        """Returns the text of an answer."""
        body = {
            "model": DEMO_MODEL_NAME,
            "messages": [{"role": "user", "content": "What is Hearth?"}],
            "max_tokens": 8,
            "temperature": 0,
        }
        headers = {"authorization": f"Bearer {self.api_key}"}
        async with httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False) as client:
            url = f"{self.urls[gateway]}/v1/chat/completions"
            response = await client.post(url, json=body, headers=headers)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]["content"]

    async def replace(self, name: str) -> None:
        """Kills a process under running requests, and starts it again."""
        running = [asyncio.create_task(self.chat(each)) for each in self.urls for _ in range(2)]
        await asyncio.sleep(0)
        self.kill(name)
        await asyncio.gather(*running)
        await self.restart(name)
        await self.wait_until_ready(DEADLINE_S)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[MutedCluster]:
    cluster = MutedCluster(tmp_path)
    try:
        await cluster.start()
        yield cluster
    finally:
        cluster.stop()


async def test_every_process_serves_on_while_its_log_cannot_be_written(
    cluster: MutedCluster, tmp_path: Path
) -> None:
    pids = {name: cluster.pid(name) for name in SERVICES}
    first = {await cluster.chat(each) for each in cluster.urls}
    await cluster.replace("decode-1")
    for reader in cluster.readers:
        os.close(reader)
    for name in ("decode-2", "kv_index-1"):
        full_disk(tmp_path / f"{name}.log")
        await cluster.replace(name)
    cluster.kill("nats-server")
    await asyncio.sleep(0.5)
    await cluster.restart("nats-server")
    await cluster.wait_until_ready(DEADLINE_S)
    assert {await cluster.chat(each) for each in cluster.urls} == first
    for name in pids.keys() - {"decode-1", "decode-2", "kv_index-1"}:
        assert cluster.pid(name) == pids[name] and cluster._processes[name].poll() is None
