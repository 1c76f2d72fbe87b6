"""The requests of clients and the heartbeats that monitors receive, of a cluster that serves a
model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import httpx
import openai

from services.local.state import LocalClusterState
from shared.messages import Heartbeat
from shared.subjects import HEARTBEATS
from shared.transport.bus import NatsBus
from tests.support.waiting import wait_until

START_TIMEOUT_S = 300  # the first start compiles kernels


@dataclass
class ClusterClient:
    state: LocalClusterState
    client: httpx.Client

    @property
    def url(self) -> str:
        return self.state.url

    def complete(self, question: str, **options: object) -> dict:
        """Requests one chat completion, not streamed; greedy by default."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
        }
        response = self.client.post("/v1/chat/completions", json=body | options)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, question: str, **options: object) -> Iterator[dict]:
        """Yields the chunks of one streamed chat completion as they arrive; greedy by default."""
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

    @cached_property
    def sdk(self) -> openai.OpenAI:
        key = self.state.api_key
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    @cached_property
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

        wait_until(is_ready, timeout_s=START_TIMEOUT_S, poll_s=0.02, seen=body)


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
