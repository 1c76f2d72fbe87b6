"""A monitored cluster, its requests, and their responses without faults."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from services.client.hearth_nats import HearthClient
from tests.chaos.checks.leftovers import left_behind
from tests.chaos.checks.monitor import Monitor, is_empty
from tests.chaos.world.constrained import constrained_requests, is_as_demanded
from tests.chaos.world.pictures import picture_requests
from tests.chaos.world.workload import NUM_STREAMS, Body, requests, with_stops
from tests.support.cluster.chaos_cluster import ChaosCluster
from tests.support.cluster.clients import ChoiceOutput, Exchange, run_exchange
from tests.support.cluster.nats_clients import run_nats_exchange
from tests.support.waiting import LIMIT_S

MAX_TRIES = 8
SLOWNESS = 8.0  # of streams with a fault, as a multiple of the slowest first token without
IMAGE_LINKS = 4  # at a worker: of the pixels of two gateways, the vectors of two encode workers
MAX_RETAINED_S = 8.0  # an ending is resent every 2 s
BROKEN_PAUSE_S, REFUSED_PAUSE_S = 0.1, 0.5  # before a client retries


@dataclass
class Call:
    """One client's request with all its tries; the last one counts."""

    path: str
    body: Body
    tries: list[Exchange] = field(default_factory=list)

    @property
    def last(self) -> Exchange:
        return self.tries[-1]


@dataclass
class Undisturbed:
    output: list[dict[int, ChoiceOutput]]
    usage: list[tuple[int, int]]
    longest_gap_s: float
    ttft_s: list[float]
    ttft_without_s: dict[str, list[float]]  # without that worker

    @property
    def limit_s(self) -> float:
        """How long streams of a row may take: pictures alone take a minute on a busy machine."""
        slowest = (max(each) for each in (self.ttft_s, *self.ttft_without_s.values()))
        return max(LIMIT_S, SLOWNESS * max(slowest))


class Chaos:
    """A cluster with its reference responses; call `learn` first. `nats`: sends all requests over
    NATS, where the client does not choose the gateway. `is_constrained`: a grammar constrains the
    output of each request. `has_images`: each request shows pictures. `num_streams`: of each run; 8
    are one of each kind.
    """

    def __init__(
        self,
        cluster: ChaosCluster,
        monitor: Monitor,
        nats: HearthClient | None = None,
        *,
        is_constrained: bool = False,
        has_images: bool = False,
        num_streams: int = NUM_STREAMS,
    ) -> None:
        self.cluster = cluster
        self.monitor = monitor
        self.nats = nats
        self.is_constrained = is_constrained
        self.has_images = has_images
        made = constrained_requests if is_constrained else requests
        self.requests = (picture_requests if has_images else made)(num_streams)
        self.undisturbed: Undisturbed
        self._num_more_links = cluster.num_more_ranks("decode") + IMAGE_LINKS * has_images
        self.idle: dict[str, dict[str, int]]  # objects of each process after undisturbed runs
        self._num_runs = 0

    async def learn(self) -> None:
        """Runs undisturbed: first to choose stop strings, then for the reference responses, each of
        which is what its grammar demands.
        """
        first = await self.run()
        if not self.is_constrained:
            with_stops(self.requests, [each.last.output for each in first])
        sent = await self.run()
        exchanges = [each.last for each in sent]
        assert all(each.is_successful for each in exchanges), [*map(str, exchanges)]
        if self.is_constrained:
            invalid = [each for each in exchanges if not is_as_demanded(each.body, each.output)]
            assert not invalid, [(each.body, each.output) for each in invalid]
        self.undisturbed = Undisturbed(
            output=[each.output for each in exchanges],
            usage=[each.usage for each in exchanges],
            longest_gap_s=max(each.pause_since(each.arrivals[0]) for each in exchanges),
            ttft_s=[each.ttft_s for each in exchanges],
            ttft_without_s={},
        )
        await self.wait_until_empty()
        self.idle = {name: await self.cluster.census(name) for name in self.cluster.services}

    async def leftovers(self) -> dict[str, dict[str, int]]:
        """What each process holds beyond its idle state; empty if nothing is left.

        An ending whose acknowledgement was lost is retained for a while; this waits for it.
        """
        give_up_at = time.monotonic() + MAX_RETAINED_S
        while (found := await self._find_leftovers()) and time.monotonic() < give_up_at:
            await asyncio.sleep(1.0)
        return found

    async def _find_leftovers(self) -> dict[str, dict[str, int]]:
        found = {}
        for name in self.cluster.services:
            now = await self.cluster.census(name)
            excess = left_behind(self.idle[name], now, num_more_links=self._num_more_links)
            if excess:
                found[name] = excess
        return found

    async def learn_without(self, worker: str) -> None:
        """Measures undisturbed times of the spares alone."""
        self.cluster.terminate(worker)
        await self.cluster.ended(worker, 20)
        sent = await self.run()
        self.undisturbed.ttft_without_s[worker] = [each.last.ttft_s for each in sent]
        await self.cluster.restart(worker)
        await self.cluster.wait_until_ready()

    async def run(self) -> list[Call]:
        sent, tasks = self.send_all()
        await asyncio.gather(*tasks)
        return sent

    def send_all(self) -> tuple[list[Call], list[asyncio.Task[None]]]:
        """Sends all requests, alternating gateways; each run has a salt: no prefix is cached."""
        self._num_runs += 1
        salt = f"run {self._num_runs}"
        sent = [Call(path, {**body, "cache_salt": salt}) for path, body in self.requests]
        gateways = [*self.cluster.urls]
        tasks = [
            asyncio.create_task(self.send(each, gateways[index % len(gateways) :] + gateways))
            for index, each in enumerate(sent)
        ]
        return sent, tasks

    async def send(self, sent: Call, gateways: list[str]) -> None:
        """Retries at the next gateway as a client does, if the response allows it."""
        for number in range(MAX_TRIES):
            gateway = gateways[number % len(gateways)]
            exchange = Exchange(sent.body, gateway)
            sent.tries.append(exchange)
            await self._run(exchange, sent.path)
            if exchange.status in (429, 503) and exchange.has_retry_after:
                await asyncio.sleep(REFUSED_PAUSE_S)
            elif exchange.is_broken:
                await asyncio.sleep(BROKEN_PAUSE_S)
            else:
                return

    async def _run(self, exchange: Exchange, path: str) -> None:
        if self.nats is not None:
            await run_nats_exchange(exchange, self.nats, path)
        else:
            url = self.cluster.urls[exchange.gateway]
            await run_exchange(exchange, url, self.cluster.api_key, path)

    def is_same(self, index: int, exchange: Exchange) -> bool:
        """Whether the output equals that of the undisturbed run of request `index`."""
        expected = self.undisturbed
        return exchange.output == expected.output[index] and exchange.usage == expected.usage[index]

    async def wait_until_empty(self, timeout_s: float = 20.0) -> float:
        """Returns the seconds until every worker is idle with all blocks. Raises NotReached."""
        started = time.monotonic()
        self.monitor.newest.clear()
        names = {n for role in ("encode", "prefill", "decode") for n in self.cluster.named(role)}

        def is_idle() -> bool:
            newest = self.monitor.newest
            return names <= newest.keys() and all(is_empty(newest[name]) for name in names)

        await self.monitor.wait(is_idle, timeout_s=timeout_s)
        return time.monotonic() - started
