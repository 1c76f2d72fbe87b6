"""The peer: Dynamo's front end with its KV router and its mockers, without etcd or NATS.

The virtual environment comes from

    pip install ai-dynamo-runtime==1.6.1 'aiohttp<4,>=3.14.3' certifi 'kubernetes<33,>=32.0.1' \\
        msgspec 'prometheus-client<1' pyzmq 'redis<9' tqdm 'transformers>=4.56' \\
        typing-extensions 'zstandard<1'
    pip install --no-deps ai-dynamo==1.6.1
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil

from benchmarks.serving.closed_loop import Target
from benchmarks.serving.cluster import START_TIMEOUT_S, Processes
from services.cli.cluster.service_options import DEMO_MODEL_DIR
from tests.support.servers import free_port

MODEL = "mocked"
SPEED_UP = "1000"  # factor of the mocked engine; 0 means 1


@asynccontextmanager
async def dynamo(
    venv: Path, folder: Path, *, is_split: bool
) -> AsyncIterator[tuple[Target, Processes]]:
    url = f"http://127.0.0.1:{free_port()}"
    frontend = ["dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", url.split(":")[2]]
    mocker = ["dynamo.mocker", "--model-path", str(DEMO_MODEL_DIR), "--model-name", MODEL]
    mocker += ["--speedup-ratio", SPEED_UP, "--num-workers", "1"]
    commands = {"frontend": [*frontend, *(["--router-mode", "kv"] if is_split else [])]}
    if is_split:
        for mode in ("prefill", "decode"):
            commands[mode] = [*mocker, "--disaggregation-mode", mode]
    else:
        commands["worker"] = mocker
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            log_path = folder / f"dynamo-{name}.log"
            started[name] = _start([str(venv / "bin" / "python"), "-m", *command], folder, log_path)
        await _ready(url)
        target = Target(url, "none", MODEL)
        yield target, {name: psutil.Process(each.pid) for name, each in started.items()}
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def _start(command: list[str], folder: Path, log_path: Path) -> subprocess.Popen[bytes]:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log_path.open("wb") as log_file:
        return subprocess.Popen(
            [*command, "--discovery-backend", "file"],
            env={**clean, "HF_HUB_OFFLINE": "1", "DYN_FILE_KV": str(folder / "dynamo")},
            cwd=folder,
            stdout=log_file,
            stderr=log_file,
        )


async def _ready(url: str) -> None:
    """Waits until a request for one token succeeds."""
    deadline = time.monotonic() + START_TIMEOUT_S
    question = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "?"}],
        "max_tokens": 1,
    }
    async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
        while True:
            try:
                response = await client.post(f"{url}/v1/chat/completions", json=question)
                if response.status_code == 200:
                    return
                told = response.text
            except httpx.HTTPError as error:
                told = repr(error)
            if time.monotonic() > deadline:
                raise TimeoutError(f"Dynamo is not ready: {told}")
            await asyncio.sleep(0.2)
