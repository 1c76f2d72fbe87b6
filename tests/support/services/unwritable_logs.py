"""Logs that cannot be written, and a cluster that has them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import httpx

from services.cli.cluster.service_options import DEMO_MODEL_NAME
from tests.support.cluster.chaos_cluster import SERVICES, ChaosCluster

PIPE_BYTES = 4096
DEADLINE_S = 60.0


def full_disk(log: Path) -> None:
    log.unlink(missing_ok=True)
    log.symlink_to("/dev/full")


def stopped_reader(log: Path) -> int:
    """Returns the reading end of a full pipe."""
    log.unlink(missing_ok=True)
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(log, os.O_WRONLY | os.O_NONBLOCK)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"\n" * PIPE_BYTES)
    os.close(writer)
    return reader


class MutedCluster(ChaosCluster):
    """A cluster whose logs cannot be written.

    `mute(name, log)` replaces the log of a process by a file that cannot be written, and returns
    the read end of its pipe, if it is one.
    """

    def __init__(self, folder: Path, mute: Callable[[str, Path], int | None]) -> None:
        super().__init__(folder, step_s=0.002)
        self.readers: dict[str, int] = {}
        self._mute = mute
        for name in SERVICES:
            self._replace_log(name)

    async def chat(self, gateway: str) -> str:
        """Returns the text of an answer. Raises AssertionError or HTTPError."""
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

    async def replace(self, name: str) -> list[str | BaseException]:
        """Kills a process under running requests, and starts it again. Returns what they got."""
        running = [asyncio.create_task(self.chat(each)) for each in self.urls for _ in range(2)]
        await asyncio.sleep(0)
        self.kill(name)
        found = await asyncio.gather(*running, return_exceptions=True)
        self._replace_log(name)
        await self.restart(name)
        await self.wait_until_ready(DEADLINE_S)
        return found

    def close_readers(self) -> None:
        while self.readers:
            os.close(self.readers.popitem()[1])

    def _replace_log(self, name: str) -> None:
        reader = self._mute(name, self.folder / f"{name}.log")
        if reader is not None:
            self.readers[name] = reader
