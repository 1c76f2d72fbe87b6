"""A full cluster, started with `hearth up` in a separate process, on free ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai

from services.local.servers import free_port
from services.local.state import LocalClusterState, running_cluster
from shared.errors import ConfigError
from shared.messages import Heartbeat
from shared.subjects import HEARTBEATS
from shared.transport.bus import NatsBus
from tests.support.waiting import wait_until

START_TIMEOUT_S = 300  # the first start compiles kernels


@dataclass
class Cluster:
    process: subprocess.Popen[str]
    state: LocalClusterState
    client: httpx.Client
    startup: str  # output of `hearth up` until the cluster was ready

    @property
    def url(self) -> str:
        return self.state.url

    def pid_of(self, process_id: str) -> int:
        """The pid of the service process with this credential. Raises LookupError if none runs."""
        for pid in self._children():
            with contextlib.suppress(OSError):  # the process may have just been killed
                environ = Path(f"/proc/{pid}/environ").read_bytes()
                if f"HEARTH_NATS_URL=nats://{process_id}:".encode() in environ:
                    return pid
        raise LookupError(f"{process_id} does not run")

    def pid_of_server(self, binary: str) -> int:
        """The pid of this cluster's nats-server or redis-server."""
        for pid in self._children():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/exe").endswith(binary):  # noqa: PTH115
                    return pid
        raise LookupError(f"{binary} does not run")

    def _children(self) -> list[int]:
        parent = self.process.pid
        text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        return [int(pid) for pid in text.split()]

    @contextlib.contextmanager
    def frozen(self, *pids: int) -> Iterator[None]:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def kill(self, process_id: str) -> None:
        os.kill(self.pid_of(process_id), signal.SIGKILL)

    def complete(self, question: str, **options: object) -> dict:
        """One chat completion, not streamed; greedy by default."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
        }
        response = self.client.post("/v1/chat/completions", json=body | options)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, question: str, **options: object) -> Iterator[dict]:
        """The chunks of one streamed chat completion as they arrive; greedy by default."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with self.client.stream("POST", "/v1/chat/completions", json=body | options) as response:
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    @property
    def sdk(self) -> openai.OpenAI:
        key = self.state.api_key
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    @property
    def model(self) -> str:
        return self.client.get("/v1/models").json()["data"][0]["id"]

    def wait_for_heartbeats(
        self, condition: Callable[[dict[str, Heartbeat]], bool], *, timeout_s: float = 60
    ) -> dict[str, Heartbeat]:
        """Returns the newest heartbeat of each process, once they satisfy `condition`."""
        credential = next(c for c in self.state.credentials if c.role == "gateway")
        url = credential.nats_url(self.state.nats_host, self.state.nats_port)
        return asyncio.run(receive_heartbeats(url, credential.process_id, condition, timeout_s))

    def wait_until_empty(self) -> None:
        """Waits until every worker has only free blocks and no running or waiting request."""
        self.wait_for_heartbeats(
            lambda newest: (
                {"prefill-1", "decode-1"} <= set(newest)
                and all(_is_empty(each) for each in newest.values())
            )
        )

    def wait_until_ready(self, *process_ids: str) -> None:
        """Waits until the gateway is ready and knows these workers."""
        operator = {"authorization": f"Bearer {self.state.operator_token}"}

        def body() -> dict:
            return self.client.get("/ready", headers=operator).json()

        def is_ready() -> bool:
            found = body()
            known = {each for ids in found["workers"].values() for each in ids}
            return found["ready"] and known.issuperset(process_ids)

        wait_until(is_ready, timeout_s=START_TIMEOUT_S, poll_s=0.05, seen=body)


def _is_empty(heartbeat: Heartbeat) -> bool:
    load = heartbeat.load
    if load is None:
        return True
    busy = load.num_running + load.num_waiting + load.num_reserved_blocks
    return busy == 0 and load.num_free_blocks == load.num_total_blocks


@dataclass
class _Newest:
    heartbeats: dict[str, Heartbeat] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        self.heartbeats[heartbeat.process_id] = heartbeat
        self.changed.set()


async def receive_heartbeats(
    url: str, process_id: str, condition: Callable[[dict[str, Heartbeat]], bool], timeout_s: float
) -> dict[str, Heartbeat]:
    """Returns the newest heartbeat of each process, once they satisfy `condition`."""
    bus = await NatsBus.connect(url, process_id=process_id)
    newest = _Newest()
    await bus.subscribe(HEARTBEATS, Heartbeat, newest.on_heartbeat)
    try:
        async with asyncio.timeout(timeout_s):
            while not condition(newest.heartbeats):
                newest.changed.clear()
                await newest.changed.wait()
    except TimeoutError:
        loads = {each: heartbeat.load for each, heartbeat in newest.heartbeats.items()}
        raise AssertionError(f"the heartbeats did not satisfy the condition: {loads}") from None
    finally:
        await bus.close()
    return newest.heartbeats


@contextlib.contextmanager
def run_cluster(
    folder: Path, *options: str, max_local_prefill_tokens: int = 4
) -> Iterator[Cluster]:
    """By default decode workers compute prompts this short; here prefill workers hand them off."""
    handed_off = {"HEARTH_MAX_LOCAL_PREFILL_TOKENS": str(max_local_prefill_tokens)}
    environ = os.environ | handed_off | {"XDG_STATE_HOME": str(folder)}
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "services", "up", "--http", f"127.0.0.1:{port}", *options]
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        state = _wait_for_state(process, folder / "hearth" / "clusters")
        headers = {"Authorization": f"Bearer {state.api_key}"}
        with httpx.Client(base_url=state.url, headers=headers, timeout=120) as client:
            yield Cluster(process, state, client, _read_startup(process))
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output


def _read_startup(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("ready in"):
            return "".join(lines)
    raise AssertionError(f"the cluster ended: {''.join(lines)}")


def _wait_for_state(process: subprocess.Popen[str], clusters: Path) -> LocalClusterState:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ConfigError):
            return running_cluster(clusters)[1]
        if process.poll() is not None:
            break
        time.sleep(0.05)
    output, _ = process.communicate(timeout=10)
    raise AssertionError(f"the cluster did not start: {output}")
