"""Rolling restarts of a gateway behind a balancer that polls /ready, under load."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial

import httpx

from shared.clock import MonotonicClock
from tests.services.gateway.conftest import API_KEY, Cluster
from tests.services.gateway.dialects.openai.test_chat_http import BODY, CHAT
from tests.support.waiting import until

NUM_RESTARTS = 2
LAME_DUCK_S = 30.0
POLL_S = 0.02
NUM_CLIENTS = 4


@dataclass
class Balancer:
    """Sends each request to a gateway whose last /ready was 200, over kept connections."""

    urls: set[str] = field(default_factory=set)
    results: Counter[str] = field(default_factory=Counter)
    _ready: list[str] = field(default_factory=list)
    _num_running: Counter[str] = field(default_factory=Counter)

    def has_served_from(self, url: str) -> bool:
        return self.results[f"200 of {url}"] > 0

    def has_left(self, url: str) -> bool:
        """Whether it sends no request there any more, as in any balancer once some polls have
        ended.
        """
        return url not in self._ready and not self._num_running[url]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Balancer]:
        headers = {"authorization": f"Bearer {API_KEY}"}
        async with httpx.AsyncClient(headers=headers, timeout=30, trust_env=False) as http:
            await self._poll(http)
            tasks = [asyncio.create_task(self._poll_often(http))]
            tasks += [asyncio.create_task(self._client(http)) for _ in range(NUM_CLIENTS)]
            yield self
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll_often(self, http: httpx.AsyncClient) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self._poll(http)

    async def _poll(self, http: httpx.AsyncClient) -> None:
        ready = []
        for url in sorted(self.urls):
            with contextlib.suppress(httpx.HTTPError):
                if (await http.get(f"{url}/ready")).status_code == 200:
                    ready.append(url)
        self._ready = ready

    async def _client(self, http: httpx.AsyncClient) -> None:
        for number in itertools.count():
            url = self._ready[number % len(self._ready)]
            self._num_running[url] += 1
            try:
                response = await http.post(url + CHAT, json=BODY)
                self.results[f"{response.status_code} of {url}"] += 1
            except httpx.HTTPError as error:
                self.results[repr(error)] += 1
            finally:
                self._num_running[url] -= 1


@dataclass
class LameDuckClock(MonotonicClock):
    """A gateway's clock, whose lame duck lasts until the balancer has left: on a busy machine a
    poll may come after any time.
    """

    has_left: Callable[[], bool]
    slept_s: list[float] = field(default_factory=list)

    async def sleep(self, delay_s: float) -> None:
        self.slept_s.append(delay_s)
        await until(self.has_left)


async def test_no_request_fails_in_rolling_restarts(cluster: Cluster) -> None:
    balancer = Balancer({cluster.gateway.http_address})
    async with balancer.running():
        for _ in range(NUM_RESTARTS):
            async with cluster.beside(lame_duck_s=LAME_DUCK_S) as beside:
                url = beside.gateway.http_address
                balancer.urls.add(url)
                await until(partial(balancer.has_served_from, url))
                clock = LameDuckClock(partial(balancer.has_left, url))
                beside.gateway._clock = clock
                await beside.gateway.drain()
                assert clock.slept_s == [LAME_DUCK_S]
            balancer.urls.discard(url)
    assert sum(balancer.results.values()) > 10 * NUM_RESTARTS
    assert {each[:7] for each in balancer.results} == {"200 of "}, balancer.results


async def test_lame_duck_serves_and_closes_connections(cluster: Cluster) -> None:
    """Then the gateway refuses; a connection that was open before is closed, too."""
    async with cluster.beside(lame_duck_s=60.0) as beside:
        gateway, http = beside.gateway, beside.http
        assert "connection" not in (await http.post(CHAT, json=BODY)).headers
        draining = asyncio.create_task(gateway.drain())
        await until(lambda: not gateway.readiness().ready)
        for _ in range(2):
            served = await http.post(CHAT, json=BODY)
            assert (served.status_code, served.headers["connection"]) == (200, "close")
        ready = await http.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "draining")
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        gateway.capacity.is_draining = True  # as after the lame duck
        refused = await http.post(CHAT, json=BODY)
        assert refused.status_code == 503
