"""Streams of the model that site b serves for site a, with the outputs of an undisturbed run; and
requests of the sites' own models.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field

import httpx

from services.cli.cluster.service_options import DEMO_MODEL_NAME
from tests.chaos.checks.metrics import scrape
from tests.chaos.sites.pair import FAR, Site, SitePair
from tests.chaos.world.workload import requests
from tests.support.cluster.clients import ChoiceOutput, Exchange, run_exchange
from tests.support.waiting import until

HOME_GATEWAY, OWN_GATEWAY = "gateway-2", "gateway-1"
OWN_MODELS = {"a": DEMO_MODEL_NAME, "b": FAR}
EMPTY = (b'"delta":{}', b'"text":""', b'"content":""')
RETRY_S = 0.2
RETRIES_S = 90.0  # longer than a gateway needs on a busy machine to start again
NUM_BEGUN_EVENTS = 15


@dataclass
class Stream:
    """A client that retries what its gateway rejects, or cuts off by dying."""

    index: int
    tries: list[Exchange] = field(default_factory=list)

    @property
    def last(self) -> Exchange:
        return self.tries[-1]

    @property
    def has_begun(self) -> bool:
        return bool(self.tries and self.last.arrivals)

    @property
    def is_moved(self) -> bool:
        return bool(self.last.metadata.get("num_resubmissions", 0))

    def longest_pause_s(self, since: float) -> float:
        """Returns the longest time without a token that ended after `since`."""
        times = token_times(self.last)
        pairs = itertools.pairwise(times)
        return max((b - max(a, since) for a, b in pairs if b > since), default=0.0)


def token_times(exchange: Exchange) -> list[float]:
    """Comments and empty chunks only keep the connection open."""
    events = zip(exchange.events, exchange.arrivals, strict=True)
    return [
        at
        for event, at in events
        if event.startswith(b"data: ") and not any(each in event for each in EMPTY)
    ]


async def moved_for_room(pair: SitePair) -> int:
    """Returns how often a stream has left a worker that had no room for it, so far."""
    async with httpx.AsyncClient(timeout=10.0, trust_env=False) as client:
        series = await scrape(client, pair.a.cluster.urls[HOME_GATEWAY])
    return int(series.get('hearth_resubmissions_total{reason="no_room"}', 0))


class FarStreams:
    def __init__(self, pair: SitePair, count: int, num_output_tokens: int) -> None:
        self.pair = pair
        self.requests = [
            (path, {**body, "model": FAR, "max_tokens": num_output_tokens})
            for path, body in requests(count)
        ]
        self.expected: list[tuple[dict[int, ChoiceOutput], tuple[int, int]]] = []
        self.longest_pause_s = 0.0  # undisturbed
        self._num_sent = 0

    async def learn(self) -> None:
        sent, tasks = self.send_all()
        await asyncio.gather(*tasks)
        for each in sent:
            assert each.last.is_successful, str(each.last)
        self.expected = [(each.last.output, each.last.usage) for each in sent]
        self.longest_pause_s = max(each.longest_pause_s(0.0) for each in sent)

    def is_same(self, stream: Stream) -> bool:
        return (stream.last.output, stream.last.usage) == self.expected[stream.index]

    def send_all(self) -> tuple[list[Stream], list[asyncio.Task[None]]]:
        sent = [Stream(index) for index in range(len(self.requests))]
        return sent, [asyncio.create_task(self.run(each)) for each in sent]

    async def run(self, stream: Stream) -> None:
        """Sends the request until it has a response. No prefix of it is cached."""
        self._num_sent += 1
        path, body = self.requests[stream.index]
        body = {**body, "cache_salt": f"stream {self._num_sent}"}
        give_up_at = time.monotonic() + RETRIES_S
        while time.monotonic() < give_up_at:
            exchange = await self._try(stream, path, body)
            is_rejected = exchange.status in (429, 503) and exchange.has_retry_after
            if not (is_rejected or exchange.is_broken):
                return
            await asyncio.sleep(RETRY_S)

    async def _try(self, stream: Stream, path: str, body: dict[str, object]) -> Exchange:
        cluster = self.pair.a.cluster
        exchange = Exchange(body, HOME_GATEWAY)
        stream.tries.append(exchange)
        return await run_exchange(exchange, cluster.urls[HOME_GATEWAY], cluster.api_key, path)

    async def until_begun(self, sent: list[Stream]) -> None:
        """Until most of the streams have sent some events. Raises NotReached."""

        def have_begun() -> bool:
            begun = [
                each for each in sent if each.tries and len(each.last.arrivals) >= NUM_BEGUN_EVENTS
            ]
            return len(begun) >= 0.75 * len(sent)

        await until(have_begun, timeout_s=60.0, poll_s=0.01)


async def first_served(pair: SitePair, timeout_s: float) -> float | None:
    """Returns the time of the first token of a new request that site b serves for site a; None: no
    such one in time.
    """
    give_up_at = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at:
        exchange = await short_request(pair.a, HOME_GATEWAY, FAR)
        if exchange.is_successful and str(exchange.metadata["decode_worker"]).startswith("b/"):
            return exchange.arrivals[0]
        await asyncio.sleep(0.05)
    return None


async def short_request(site: Site, gateway: str, model: str) -> Exchange:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"What is a site? {time.monotonic()}"}],
        "max_tokens": 2,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    exchange = Exchange(dict(body), gateway)
    url, api_key = site.cluster.urls[gateway], site.cluster.api_key
    return await run_exchange(exchange, url, api_key, "/v1/chat/completions")


@dataclass
class OwnRequests:
    """`async with` sends short requests to one site for its own workers until the block's end."""

    site: Site
    every_s: float = 0.5
    sent: list[Exchange] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> OwnRequests:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait((self._task,))

    @property
    def num_failed(self) -> int:
        return sum(not each.is_successful for each in self.sent)

    @property
    def longest_s(self) -> float:
        return max((each.ended - each.started for each in self.sent), default=0.0)

    async def _run(self) -> None:
        while True:
            model = OWN_MODELS[self.site.name]
            self.sent.append(await short_request(self.site, OWN_GATEWAY, model))
            await asyncio.sleep(self.every_s)
