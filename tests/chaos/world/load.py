"""Clients that send requests without pause, or leave in the middle of a response."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from services.client.http_client import http_request
from tests.chaos.chaos import Call, Chaos

LONGEST_STAY_S = 1.0
NUM_CLIENTS = 16
LONG_OUTPUT_TOKENS = 4000  # max_tokens: takes a minute unless aborted


@dataclass
class Steady:
    """`async with` runs `num_clients` clients until the end of the block, then waits for them.

    Only failures are stored, so that it may run for long: broken in the middle, without a response,
    or with another response than undisturbed.
    """

    chaos: Chaos
    num_clients: int = NUM_CLIENTS
    num_requests: int = 0
    num_resubmitted: int = 0
    num_refused: int = 0  # tries
    num_tokens: int = 0
    failed: list[Call] = field(default_factory=list)
    _is_over: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Steady:
        self._tasks = [asyncio.create_task(self._client(n)) for n in range(self.num_clients)]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _client(self, number: int) -> None:
        rng = random.Random(number)
        gateways = [*self.chaos.cluster.urls]
        while not self._is_over:
            index = rng.randrange(len(self.chaos.requests))
            path, body = self.chaos.requests[index]
            sent = Call(path, {**body, "cache_salt": f"{number} {rng.random()}"})
            rng.shuffle(gateways)
            await self.chaos.send(sent, gateways)
            self._count(index, sent)

    def _count(self, index: int, sent: Call) -> None:
        is_cut = any(each.is_broken and each.status == 200 for each in sent.tries)
        is_same = sent.last.is_successful and self.chaos.is_same(index, sent.last)
        if is_cut or not is_same:
            self.failed.append(sent)
        self.num_requests += 1
        self.num_tokens += sum(sent.last.usage)
        self.num_resubmitted += sent.last.metadata.get("num_resubmissions", 0) > 0
        self.num_refused += sum(each.status != 200 for each in sent.tries)


async def leave_early(chaos: Chaos, count: int, *, at_once: int = 48) -> None:
    """`count` clients that send a request and leave after a random time, in any phase."""
    limit, rng = asyncio.Semaphore(at_once), random.Random(count)

    async def one(number: int) -> None:
        async with limit:
            await _leave_after(chaos, number, rng.random() ** 2 * LONGEST_STAY_S, rng.random())

    await asyncio.gather(*(one(number) for number in range(count)))


async def _leave_after(chaos: Chaos, number: int, stay_s: float, chance: float) -> None:
    url = [*chaos.cluster.urls.values()][number % len(chaos.cluster.urls)]
    path, body = chaos.requests[number % len(chaos.requests)]
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    long_body = {**body, "max_tokens": LONG_OUTPUT_TOKENS, "stop": None}
    if chance < 0.7:
        long_body["cache_salt"] = f"leaves {number}"
    writer.write(http_request(url, chaos.cluster.api_key, path, long_body))
    try:
        async with asyncio.timeout(stay_s):
            while await reader.read(65536):
                pass
    except TimeoutError:
        pass
    if chance < 0.5:
        writer.transport.abort()  # without FIN, like a failed machine
    writer.close()
