"""A local cluster of real processes for one model, and requests to it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import httpx

from services.local.cluster import LocalCluster
from services.local.plan import UpOptions
from shared.clock import MonotonicClock
from shared.messages import Heartbeat, WorkerLoad
from tests.support.cluster.clients import Exchange, send
from tests.support.cluster.cluster_client import receive_heartbeats

MODEL = "model-under-test"
CHAT = "/v1/chat/completions"
QUESTION = "What is the KV cache?"
TIMEOUT_S = 300.0
HEARTBEAT_TIMEOUT_S = 20.0

Body = dict[str, Any]
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Answer:
    """The answer to one request, and its `seconds`. `text` is the error's message unless the status
    is 200.
    """

    status: int
    text: str
    seconds: float
    finish_reason: str = ""
    warnings: tuple[str, ...] = ()
    message: Any = None  # in the dialect's form


@dataclass(frozen=True)
class Served:
    """One cluster under test."""

    cluster: LocalCluster
    http: httpx.AsyncClient

    def chat(self, **fields: Any) -> Body:
        messages = [{"role": "user", "content": QUESTION}]
        return {"model": MODEL, "messages": messages, "temperature": 0, **fields}

    async def ask(self, body: Body) -> Answer:
        """Requests one chat completion, not streamed."""
        began = time.perf_counter()
        response = await self.http.post(CHAT, json=body)
        seconds = time.perf_counter() - began
        if response.status_code != 200:
            return Answer(response.status_code, response.text, seconds)
        decoded = response.json()
        (choice,) = decoded["choices"]
        return Answer(
            200,
            choice["message"]["content"] or "",
            seconds,
            choice["finish_reason"],
            tuple(decoded.get("hearth", {}).get("warnings", ())),
            choice["message"],
        )

    async def run(self, body: Body) -> Answer:
        """Requests the answer over Workers AI, whose path holds the model."""
        fields = {name: value for name, value in body.items() if name != "model"}
        account = f"/client/v4/accounts/{self.cluster.tenant_id}"
        began = time.perf_counter()
        response = await self.http.post(f"{account}/ai/run/{MODEL}", json=fields)
        seconds = time.perf_counter() - began
        if response.status_code != 200:
            return Answer(response.status_code, response.text, seconds)
        result = response.json()["result"]
        return Answer(200, result["response"], seconds, result["finish_reason"])

    async def send(self, members: bytes, body: Body) -> Answer:
        """Sends `members` beside the body's own, as they are: not even JSON. Whole, not streamed.

        Status 0: the connection was lost.
        """
        content = httpx.Request("POST", "http://-", json=body).content[:-1] + b"," + members + b"}"
        began = time.perf_counter()
        headers = {"content-type": "application/json"}
        try:
            response = await self.http.post(CHAT, content=content, headers=headers)
        except httpx.HTTPError as error:
            return Answer(0, repr(error), time.perf_counter() - began)
        return Answer(response.status_code, response.text, time.perf_counter() - began)

    async def stream(self, body: Body) -> Exchange:
        """Returns the times of all events. Raises ValueError if it is not answered in full."""
        streamed = {**body, "stream": True}
        exchange = await send(self.cluster.url, self.cluster.api_key, CHAT, streamed)
        if not exchange.is_successful:
            raise ValueError(f"a stream failed: {exchange}")
        return exchange

    async def worker_loads(self) -> dict[str, WorkerLoad]:
        """Returns the newest counters of each worker."""
        assert self.cluster.observer is not None, "the cluster's own NATS"
        url, process_id = self.cluster.observer
        names = {
            each
            for each in self.cluster.process_ids
            if each.startswith(("prefill", "decode", "worker"))
        }

        def has_all(newest: dict[str, Heartbeat]) -> bool:
            return names <= newest.keys()

        newest = await receive_heartbeats(url, process_id, has_all, HEARTBEAT_TIMEOUT_S)
        return {name: each.load for name, each in newest.items() if each.load is not None}


@asynccontextmanager
async def served(model_dir: Path, **options: Any) -> AsyncIterator[Served]:
    """Runs a cluster, by default with one prefill and one decode worker. `options` are others of
    `UpOptions`.
    """
    with TemporaryDirectory(prefix="hearth-structured-") as folder:
        up = UpOptions(model_dir=model_dir, model_name=MODEL, http_port=0, device="cpu", **options)
        cluster = LocalCluster(up, MonotonicClock(), state_parent=Path(folder))
        async with (
            cluster,
            httpx.AsyncClient(
                base_url=cluster.url,
                headers={"authorization": f"Bearer {cluster.api_key}"},
                timeout=TIMEOUT_S,
                trust_env=False,
                limits=httpx.Limits(max_connections=None),
            ) as http,
        ):
            yield Served(cluster, http)


async def at_most_at_once(
    count: int, items: Iterable[Item], run: Callable[[Item], Awaitable[Result]]
) -> list[Result]:
    """Runs each item, at most `count` at the same time. Returns the results in order."""
    semaphore = asyncio.Semaphore(count)

    async def one(item: Item) -> Result:
        async with semaphore:
            return await run(item)

    return await asyncio.gather(*(one(each) for each in items))


def gaps_s(exchanges: Sequence[Exchange], *, skip: int = 2) -> list[float]:
    """Returns the times between consecutive events of each, without the first ones,
    which hold no text.
    """
    found: list[float] = []
    for each in exchanges:
        times = each.arrivals[skip:]
        found += [after - before for before, after in itertools.pairwise(times)]
    return found
