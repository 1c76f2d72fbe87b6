"""Streams of several models, and their outputs without faults."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from services.client.chat_request import gateway_client
from tests.chaos.hosts.site import MODELS, HostSite
from tests.chaos.world.workload import Body, requests
from tests.support.cluster.clients import ChoiceOutput, Exchange, run_exchange
from tests.support.waiting import until

HOT = ("a", "b")
KINDS = (1, 3, 4, 6)  # of requests: seeded, two choices, penalties, logprobs
NUM_OUTPUT_TOKENS = 300  # a second or two, so that a fault finds all of them running


@dataclass
class Stream:
    """One request of a client that does not retry. `number`: of its kind."""

    model: str
    number: int
    exchange: Exchange
    task: asyncio.Task[Exchange]


Outputs = dict[tuple[str, int], dict[int, ChoiceOutput]]  # by model and kind


@dataclass
class Streams:
    """`expected`: the outputs of undisturbed runs, by model and kind of request."""

    site: HostSite
    num_output_tokens: int = NUM_OUTPUT_TOKENS
    kinds: list[tuple[str, Body]] = field(
        default_factory=lambda: [requests()[each] for each in KINDS]
    )
    expected: Outputs = field(default_factory=dict)
    _num_sent: int = 0

    def send(self, model: str, number: int) -> Stream:
        """No prefix of it is cached."""
        self._num_sent += 1
        path, body = self.kinds[number]
        salt = {"cache_salt": f"stream {self._num_sent}", "model": model}
        length = {"max_tokens": self.num_output_tokens}
        exchange = Exchange({**body, **length, **salt}, "gateway")
        cluster = self.site.cluster
        run = run_exchange(exchange, cluster.url, cluster.api_key, path)
        return Stream(model, number, exchange, asyncio.create_task(run))

    def send_all(self, models: tuple[str, ...]) -> list[Stream]:
        return [self.send(model, number) for model in models for number in range(len(self.kinds))]

    async def learn(self) -> None:
        for model in MODELS:
            await self.site.wake(model)
        await self._until_listed()
        sent = self.send_all(MODELS)
        await asyncio.gather(*(each.task for each in sent))
        for each in sent:
            assert each.exchange.is_successful, str(each.exchange)
            self.expected[each.model, each.number] = each.exchange.output
        texts = [str(self.expected[model, 0]) for model in MODELS]
        assert len(set(texts)) == len(MODELS), "models that answer alike hide a mix-up"

    async def _until_listed(self) -> None:
        """The gateway reads what hosts record in the model registry once a second."""
        cluster = self.site.cluster
        async with gateway_client(cluster.url, cluster.api_key) as client:

            async def is_listed() -> bool:
                return len((await client.get("/v1/models")).json()["data"]) >= len(MODELS)

            await until(is_listed, poll_s=0.05)

    def is_same(self, stream: Stream) -> bool:
        return stream.exchange.output == self.expected[stream.model, stream.number]
