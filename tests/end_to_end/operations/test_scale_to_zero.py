"""A model without workers: a request over HTTP waits for the first one, which an autoscaler starts
that reads the metric, or the event on NATS that the guide names.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest

from services.client.hearth_nats import ApiError, HearthClient
from shared.messages import Heartbeat
from tests.support.cluster.chaos_cluster import DEMO_MODEL_NAME, OBSERVER, ChaosCluster
from tests.support.cluster.clients import send
from tests.support.guide_blocks import FOLDER
from tests.support.nats_clients import connect_ordered
from tests.support.waiting import until

SERVICES = ("kv_index-1", "scheduler-1", "decode-1", "gateway-1")
COLD_START = {"cold-start-s": "120"}
BODY = {
    "model": DEMO_MODEL_NAME,
    "messages": [{"role": "user", "content": "What is a block?"}],
    "max_tokens": 8,
    "stream": True,
}
WANTED = re.compile(r'^hearth_wanted_workers{model="(.*?)",role="(.*?)"} (\d+)\.0$', re.MULTILINE)
SUBJECT = re.search(r"subject `(.*?)`", (FOLDER / "kubernetes.md").read_text())


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[ChaosCluster]:
    cluster = ChaosCluster(
        tmp_path,
        step_s=0.002,
        services=SERVICES,
        worker_options={"kv-cache-bytes": str(256 * 256)},
        scheduler_options=COLD_START,
        gateway_options=COLD_START,
    )
    try:
        await cluster.start()
        yield cluster
    finally:
        cluster.stop()


class Autoscaler:
    """The last advice by role, from both sources."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.events: dict[str, int] = {}

    async def metric(self) -> dict[str, int]:
        text = (await self._http.get("/metrics")).text
        return {role: int(wanted) for model, role, wanted in WANTED.findall(text)}

    async def on_event(self, message: object) -> None:
        heartbeat = msgspec.msgpack.decode(message.data, type=Heartbeat)  # type: ignore[attr-defined]
        assert heartbeat.scheduler is not None
        self.events = {
            each.role: each.num_wanted_workers
            for each in heartbeat.scheduler.demands
            if each.model == DEMO_MODEL_NAME
        }

    async def until_wanted(self, number: int) -> None:
        """Waits until both sources ask for so many workers of each role; none: for no role."""
        wanted = {"prefill": number, "decode": number}

        async def is_wanted() -> bool:
            found = (self.events, await self.metric())
            return all(each == wanted or (not number and not any(each.values())) for each in found)

        await until(is_wanted, seen=lambda: self.events)


@pytest.mark.long
async def test_request_waits_for_the_worker_that_is_started_for_it(cluster: ChaosCluster) -> None:
    assert SUBJECT is not None
    url = cluster.urls["gateway-1"]
    nats = await connect_ordered(cluster.observer_url, inbox_prefix=f"_INBOX.{OBSERVER}")
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:
        autoscaler = Autoscaler(http)
        await nats.subscribe(SUBJECT[1], cb=autoscaler.on_event)
        await nats.flush()
        cluster.terminate("decode-1")
        assert await cluster.ended("decode-1", 60) == 0
        await autoscaler.until_wanted(0)
        waiting = asyncio.create_task(send(url, cluster.api_key, "/v1/chat/completions", BODY))
        await autoscaler.until_wanted(1)
        await check_deadline(cluster)
        assert not waiting.done()
        await cluster.restart("decode-1")
        answer = await waiting
        await autoscaler.until_wanted(0)
    await nats.close()
    assert answer.is_successful, str(answer)
    assert answer.output[0].finish_reasons == ["length"]


async def check_deadline(cluster: ChaosCluster) -> None:
    """A request that states one over NATS does not wait longer."""
    client = await HearthClient.connect(cluster.client_url)
    with pytest.raises(ApiError) as raised:
        await client.request("chat", {**BODY, "stream": False}, deadline_s=0.3)
    assert raised.value.status == 504
    await client.close()
