"""Logs that cannot be written, and a cluster that has them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.support.cluster.chaos_cluster import SERVICES, ChaosCluster
from tests.support.cluster.service_processes import OPERATOR
from tests.support.cluster.vision_cluster import content, picture
from tests.support.services.seeing_dir import write_seeing_dir
from tests.support.services.vision_dir import PATCH, SCALE, TILE

MODEL_NAME = "smolvlm-tiny"
SEEING_SERVICES = (*SERVICES, "encode-1", "encode-2")
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
    """A cluster of all roles whose logs cannot be written.

    `mute(name, log)` replaces the log of a process by a file that cannot be written, and returns
    the read end of its pipe, if it is one.
    """

    def __init__(self, folder: Path, mute: Callable[[str, Path], int | None]) -> None:
        vision = {"image_size": TILE, "patch_size": PATCH}
        super().__init__(
            folder,
            step_s=None,
            model=(write_seeing_dir(folder / MODEL_NAME, vision, SCALE), MODEL_NAME),
            worker_options={"dtype": "float32", "kv-cache-bytes": str(32 << 20)},
            services=SEEING_SERVICES,
        )
        self.readers: dict[str, int] = {}
        self._mute = mute
        self._num_chats = 0
        for name in self.services:
            self._replace_log(name)

    async def chat(self, gateway: str) -> str:
        """Returns the answer to a question about a picture, which is encoded each time. Raises
        AssertionError or HTTPError.
        """
        self._num_chats += 1
        body = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": content("What is this?", picture(1))}],
            "max_tokens": 8,
            "ignore_eos": True,
            "temperature": 0,
            "cache_salt": f"chat {self._num_chats}",
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

    async def has_encoded(self, name: str) -> bool:
        """Whether a gateway's view shows that this worker has encoded images since its start."""
        async with httpx.AsyncClient(headers=OPERATOR, trust_env=False) as client:
            response = await client.get(f"{self.urls['gateway-1']}/v1/cluster")
        return bool(response.json()["processes"].get(name, {}).get("num_encoded_images"))

    def close_readers(self) -> None:
        while self.readers:
            os.close(self.readers.popitem()[1])

    def _replace_log(self, name: str) -> None:
        reader = self._mute(name, self.folder / f"{name}.log")
        if reader is not None:
            self.readers[name] = reader
